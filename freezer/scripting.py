"""Captures that keep a model's control flow: torch.jit.script, and a TorchScript source as it came."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator

import torch

from freezer.capture_errors import code_of, script_sentence
from freezer.captured import Captured, lines_of
from freezer.errors import CaptureError
from freezer.faithful import Call, EagerAnswers, hold, native_call
from freezer.legacy import torchscript_deprecations_silenced
from freezer.preserving import check_scripted, compiled_too
from freezer.subject import Subject


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
