"""Captures that keep a model's control flow: torch.jit.script, and a TorchScript source
unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import Original, check_answers
from freezer.freezing.capture.program import Captured, lines_of
from freezer.freezing.diagnostics import sentence
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
        CaptureError: TorchScript does not take the model, or the script differs from it.
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
        raise CaptureError(f"torch.jit.script: {sentence(error, 'script')}") from error
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
        method = getattr(model, name, None)  # names with a dot are attributes of submodules
        if inspect.ismethod(method) and not hasattr(method, "_torchscript_modifier"):
            marked.append(torch.jit.export(method.__func__))
    try:
        yield
    finally:
        for function in marked:
            vars(function).pop("_torchscript_modifier", None)
