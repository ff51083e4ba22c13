"""Captures that keep a model's control flow: torch.jit.script, and a TorchScript source
unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import Original, check_answers
from freezer.freezing.capture.program import Captured, lines_of
from freezer.freezing.diagnostics import script_sentence
from freezer.freezing.models import PRESERVE
from freezer.runtime.loaders import torchscript_deprecations_silenced


def as_is(original: Original) -> Captured:
    """Take a TorchScript source in its initial state."""
    subject = original.subject
    return Captured(
        name="as-is", program=subject.fresh(), convention="native", preserve=subject.kept_names
    )


def script(original: Original) -> Captured:
    """Compile a model from its source, with the methods to keep. Traced and scripted parts stay
    unchanged.

    Raises:
        CaptureError: TorchScript does not take the model or a name to keep, or the script differs
            from the model.
    """
    subject = original.subject
    model = subject.fresh()
    try:
        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            _new_types(),
            _exported_methods(model, subject.kept_names),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            program = torch.jit.script(model)
    except Exception as error:
        raise CaptureError(f"torch.jit.script: {script_sentence(error)}") from error
    _check_kept(program, subject.kept_names)
    unchecked = check_answers("the script", program, original, flat=False)
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
    recursive = torch.jit._recursive
    store = recursive.concrete_type_store
    recursive.concrete_type_store = recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        recursive.concrete_type_store = store


@contextlib.contextmanager
def _exported_methods(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make torch.jit.script compile those names that are methods, as if they had
    @torch.jit.export.
    """
    marked = []
    for name in names:
        owner, last = _owner(model, name)
        method = getattr(owner, last, None)
        if isinstance(owner, torch.jit.ScriptModule):
            continue
        if inspect.ismethod(method) and not hasattr(method, "_torchscript_modifier"):
            function = torch.jit.export(method.__func__)
            marked.append(function)
    try:
        yield
    finally:
        for function in marked:
            vars(function).pop("_torchscript_modifier", None)


def _check_kept(program: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        owner, last = _owner(program, name)
        known = False
        if isinstance(owner, torch.jit.ScriptModule):
            methods = owner._c._method_names()
            known = last in methods or owner._c.hasattr(last)
        if not known:
            raise CaptureError(
                f"preserve: TorchScript cannot keep {name!r}: its value has a type that TorchScript"
                " lacks, or it is ignored; make it a tensor, number, text, or list, tuple or dict"
                " of one type",
                code=PRESERVE,
            )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The submodule that a dotted name belongs to, None if there is none; and the last part of the
    name.
    """
    path, _, last = name.rpartition(".")
    owner: object = model
    for part in filter(None, path.split(".")):
        owner = getattr(owner, part, None)
    return cast(nn.Module | None, owner), last
