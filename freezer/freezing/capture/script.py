"""Captures that keep a model's control flow: torch.jit.script, and a TorchScript source
unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import (
    EagerAnswers,
    ProgramCall,
    check_answers,
    native_call,
)
from freezer.freezing.capture.program import Captured, lines_of
from freezer.freezing.diagnostics.messages import code_of, script_sentence
from freezer.freezing.models import PRESERVE, Subject
from freezer.runtime.loaders import torchscript_deprecations_silenced


def as_is(subject: Subject) -> Captured:
    """Take a TorchScript source in its initial state."""
    return Captured(
        name="as-is", program=subject.fresh(), convention="native", preserve=subject.kept_names
    )


def script(subject: Subject, eager: Callable[[], EagerAnswers]) -> Captured:
    """Compile a model from its source, with the methods to keep. Traced and scripted parts stay
    unchanged.

    Raises:
        CaptureError: TorchScript does not take the model or a name to keep, or the script differs
            from the model.
    """
    model = subject.fresh()
    try:
        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            _new_types(),
            _compiled_too(model, subject.kept_names),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            program = torch.jit.script(model)
    except Exception as error:
        raise CaptureError(
            f"torch.jit.script: {script_sentence(error)}", code=code_of(error)
        ) from error
    _check_kept(program, subject.kept_names)
    answers = eager()

    def fresh() -> ProgramCall:
        with torch.no_grad():  # see calls.copied
            return native_call(
                program if answers.second is None else copy.deepcopy(program), subject
            )

    unchecked = check_answers("the script", fresh, subject, answers)
    return Captured(
        name="script",
        program=program,
        convention="native",
        warnings=(*lines_of(caught), *unchecked),
        preserve=subject.kept_names,
    )


@contextlib.contextmanager
def _new_types() -> Iterator[None]:
    """Make torch.jit.script compile each class again.

    It caches the type of a class that it failed to compile, and the next time only reports that
    `forward` cannot be redefined.
    """
    kept = torch.jit._recursive.concrete_type_store
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        torch.jit._recursive.concrete_type_store = kept


@contextlib.contextmanager
def _compiled_too(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make torch.jit.script compile those names that are methods, as if they had
    @torch.jit.export.
    """
    owned = [_owner(model, name) for name in names]
    methods = [
        getattr(owner, last, None)
        for owner, last in owned
        if not isinstance(owner, torch.jit.ScriptModule)
    ]
    functions = [method.__func__ for method in methods if inspect.ismethod(method)]
    marked = [function for function in functions if not hasattr(function, "_torchscript_modifier")]
    for function in marked:
        torch.jit.export(function)
    try:
        yield
    finally:
        for function in marked:
            if hasattr(function, "_torchscript_modifier"):
                del function._torchscript_modifier


def _check_kept(program: torch.jit.ScriptModule, names: Sequence[str]) -> None:
    for name in names:
        owner, last = _owner(program, name)
        scripted = isinstance(owner, torch.jit.ScriptModule)
        if not scripted or not (owner._c.hasattr(last) or last in owner._c._method_names()):
            raise CaptureError(
                f"preserve: TorchScript cannot keep {name!r}: its value has a type that TorchScript"
                " lacks, or it is ignored; make it a tensor, number, text, or list, tuple or dict"
                " of one type",
                code=PRESERVE,
            )


def _owner(model: Any, name: str) -> tuple[Any, str]:
    """The submodule that a dotted name belongs to, None if there is none; and the last part of the
    name.
    """
    *path, last = name.split(".")
    for part in path:
        model = getattr(model, part, None)
    return model, last
