"""Captures that keep a model's control flow: torch.jit.script, and a TorchScript source as it came."""

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
from freezer.freezing.capture.equivalence import Call, EagerAnswers, hold, native_call
from freezer.freezing.capture.program import Captured, lines_of
from freezer.freezing.diagnostics.messages import code_of, script_sentence
from freezer.freezing.models.subject import Subject
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

CODE = "CP-PRESERVE"


def as_is(subject: Subject) -> Captured:
    """A TorchScript source, in its initial state."""
    return Captured(name="as-is", program=subject.fresh(), convention="native", preserve=subject.kept_names)


def script(subject: Subject, eager: Callable[[], EagerAnswers]) -> Captured:
    """A model compiled from its source, with the methods that must be kept. Traced and scripted parts stay as they are.

    Raises:
        CaptureError: TorchScript does not take it, lacks what must be kept, or what it makes differs from the model.
    """
    model = subject.fresh()
    try:
        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            _new_types(),
            compiled_too(model, subject.kept_names),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            program = torch.jit.script(model)
    except Exception as error:
        raise CaptureError(f"torch.jit.script: {script_sentence(error)}", code=code_of(error)) from error
    check_scripted(program, subject.kept_names)
    answers = eager()

    def fresh() -> Call:
        with torch.no_grad():  # as Subject.fresh
            return native_call(program if answers.second is None else copy.deepcopy(program), subject)

    unheld = hold("the script", fresh, subject, answers)
    return Captured(
        name="script",
        program=program,
        convention="native",
        warnings=(*lines_of(said), *unheld),
        preserve=subject.kept_names,
    )


@contextlib.contextmanager
def _new_types() -> Iterator[None]:
    """Let torch.jit.script compile each class anew.

    It keeps the type of a class that it could not compile, and says of the same class the next time that `forward` cannot be
    redefined, whatever is wrong.
    """
    kept = torch.jit._recursive.concrete_type_store
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        torch.jit._recursive.concrete_type_store = kept


def refuse_kept(names: Sequence[str], what: str) -> None:
    """Refuse a capture that makes one function of a model.

    Raises:
        CaptureError: something is to be kept; code CP-PRESERVE.
    """
    if names:
        listed = ", ".join(repr(name) for name in names)
        raise CaptureError(
            f"{what} keeps no attribute or method, and {listed} must stay; preserve needs torch.jit.script or a TorchScript source",
            code=CODE,
        )


def check_scripted(program: torch.jit.ScriptModule, names: Sequence[str]) -> None:
    """Hold the names against a scripted model.

    Raises:
        CaptureError: it lacks one; code CP-PRESERVE.
    """
    for name in names:
        owner, last = _owner(program, name)
        if owner is None or not _has_scripted(owner, last):
            raise CaptureError(
                f"preserve: TorchScript keeps no {name!r}: its value is of no type that TorchScript has, or it is ignored; make it "
                "a tensor, number, text, or list, tuple or dict of one type",
                code=CODE,
            )


@contextlib.contextmanager
def compiled_too(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let torch.jit.script compile those of the names that are methods, as if @torch.jit.export stood above them."""
    functions = [function for name in names if (function := _method(model, name)) is not None]
    marked = [function for function in functions if not hasattr(function, "_torchscript_modifier")]
    for function in marked:
        torch.jit.export(function)
    try:
        yield
    finally:
        for function in marked:
            if hasattr(function, "_torchscript_modifier"):
                del function._torchscript_modifier


def _owner(model: Any, name: str) -> tuple[Any, str]:
    """The submodule that a dotted name is of, None where there is none; and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        model = getattr(model, part, None)
    return model, last


def _has_scripted(owner: Any, last: str) -> bool:
    return isinstance(owner, torch.jit.ScriptModule) and (owner._c.hasattr(last) or last in owner._c._method_names())


def _method(model: nn.Module, name: str) -> Any:
    """The function of a method of a Python module; None where the name is no such method."""
    owner, last = _owner(model, name)
    if owner is None or isinstance(owner, torch.jit.ScriptModule):
        return None
    value = getattr(owner, last, None)
    return value.__func__ if inspect.ismethod(value) else None
