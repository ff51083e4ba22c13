"""Compare a captured program's answers with the eager model's, on every input set of the subject.

A trace keeps the branch and the Python numbers of its example and only warns; here the difference
shows before anything is built.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from freezer.codec import frozen
from freezer.compare import structure_problem
from freezer.errors import CaptureError
from freezer.freezing.capture.program import sizes_text
from freezer.freezing.diagnostics import sentence
from freezer.freezing.models import NamedTensors, Subject, call_source, same_each_time
from freezer.runtime.devices import CPU
from freezer.runtime.input_sets import InputSet, on_device
from freezer.runtime.tensors import cloned, comparable, in_double, leaves_of, same_bytes, values_of
from freezer.spec import Point

DIFFERS = "CP-CAPTURE-DIFFERS"
"""Code of a program whose answers differ from its model's."""

_TOLERANCES = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""By dtype, the allowed difference relative to the value, and to the median of all values. Model
and program run the same kernels, so they differ by rounding or by a lot; the drift gate measures
what is between."""

_TOLERANCE = 1e-4
"""The tolerance of float32 and complex64."""

_MAX_LINES = 3

Tensors = Sequence[Tensor]

ProgramCall = Callable[[NamedTensors], list[Tensor]]
"""Runs a program on an input set; returns tensors in the order of the subject's outputs."""


@frozen
class EagerAnswers:
    """The eager model's answers.

    Attributes:
        first: answer to each input set of the subject, from the initial state.
        second: answer to the first set right after its first answer; None if a call changes
            nothing.
        deterministic: whether it answers the same twice from the same state; otherwise nothing can
            be compared with it.
    """

    first: Sequence[Tensors]
    second: Tensors | None
    deterministic: bool

    @property
    def stateful(self) -> bool:
        """Whether a call changes the answer to the next."""
        return self.second is not None


@dataclass(frozen=True, kw_only=True)
class Original:
    """What is captured: a model for some sizes.

    Attributes:
        subject: the model, with input sets at these sizes only.
        point: the only sizes that the graph is for; None for all.
    """

    subject: Subject
    point: Point | None

    @functools.cached_property
    def eager(self) -> EagerAnswers:
        """The eager model's answers, computed when first needed."""
        return run_eager(self.subject)


def run_eager(subject: Subject) -> EagerAnswers:
    """Run the eager model once on each set, and a few times more to learn whether it is stateful or
    random.

    Raises:
        CaptureError: it fails on one of its sets.
    """
    first, *others = subject.sets
    model = subject.fresh()
    before = [buffer.clone() for buffer in model.buffers()]
    call = caller(model, subject)
    answers = [
        eager_answer(call, set_name(index, input_set), input_set)
        for index, input_set in enumerate(subject.sets)
    ]
    unchanged = all(map(same_bytes, before, model.buffers()))

    def fresh() -> ProgramCall:
        return caller(subject.fresh(), subject)

    def same_answer(call: ProgramCall) -> bool:
        return _problem(answers[0], call(first.tensors), subject) is None

    if unchanged and same_each_time(lambda: same_answer(call)):
        return EagerAnswers(first=answers, second=None, deterministic=True)
    if not same_each_time(lambda: same_answer(fresh())):
        return EagerAnswers(first=answers, second=None, deterministic=False)
    call_twice = fresh()
    call_twice(first.tensors)
    second = call_twice(first.tensors)
    from_start = [fresh()(input_set.tensors) for input_set in others]
    return EagerAnswers(first=[answers[0], *from_start], second=second, deterministic=True)


def check_answers(
    what: str,
    program: nn.Module,
    original: Original,
    *,
    flat: bool,
) -> tuple[str, ...]:
    """Compare a captured program with the eager model's answers.

    Some of torch's kernels for GPUs approximate: those of `nn.TransformerEncoderLayer` compute GELU
    by tanh. So a program on a GPU may agree with the model on the CPU instead.

    Args:
        what: name of the program in messages: `the trace`.
        program: the program in its initial state, which it keeps.
        original: the model and its answers.
        flat: whether the program takes its tensors in order.

    Returns:
        A warning if the model is random, so that nothing was compared, or approximates.

    Raises:
        CaptureError: the program fails, or an output's shape, dtype or values differ.
    """
    subject, eager = original.subject, original.eager
    if not eager.deterministic:
        return (f"{what} was not compared with the model, whose answers to the same inputs differ",)
    try:
        _check(what, program, original, eager, flat)
    except CaptureError:
        if subject.host is None:
            raise
        sets = [on_device(input_set, CPU) for input_set in subject.sets]
        on_host = run_eager(replace(subject.host, sets=sets))
        with contextlib.suppress(CaptureError):
            _check(what, program, original, on_host, flat)
            return (f"{what} agrees with the model on the CPU; on {subject.device} it differs",)
        raise
    return ()


def _check(
    what: str, program: nn.Module, original: Original, eager: EagerAnswers, flat: bool
) -> None:
    subject = original.subject
    for index, input_set in enumerate(subject.sets):
        call = fresh_call(program, original, flat=flat)
        name = set_name(index, input_set)
        compare_call(what, name, call, input_set, eager.first[index], subject)
    if eager.second is not None:
        first = subject.sets[0]
        call = fresh_call(program, original, flat=flat)
        call(first.tensors)
        name = f"the second call with {set_name(0, first)}"
        compare_call(what, name, call, first, eager.second, subject)


def compare_call(
    what: str,
    name: str,
    call: ProgramCall,
    input_set: InputSet,
    expected: Tensors,
    subject: Subject,
) -> None:
    """Raise CaptureError if a program fails on an input set, or answers differently."""
    cause = None
    try:
        problem = _problem(expected, call(input_set.tensors), subject)
    except Exception as error:
        problem, cause = sentence(error, "run"), error
    if problem is not None:
        message = f"{what} differs from the model on {name}: {problem}"
        raise CaptureError(message, code=DIFFERS) from cause


def eager_answer(call: ProgramCall, name: str, input_set: InputSet) -> list[Tensor]:
    """The eager model's answer.

    Raises:
        CaptureError: the model fails.
    """
    try:
        return call(input_set.tensors)
    except Exception as error:
        raise CaptureError(
            f"the eager model fails on {name}: {sentence(error, 'run')}; declare only sizes that it"
            " takes (`min`, `max`, `multiple_of`)"
        ) from error


def fresh_call(program: nn.Module, original: Original, *, flat: bool) -> ProgramCall:
    """Calls a program from its initial state: a copy if a call changes it."""
    if original.eager.stateful:
        program = copy_of(program)
    return caller(program, original.subject, flat=flat)


def copy_of(program: nn.Module) -> nn.Module:
    """A copy of a captured program."""
    # without gradients: see models.copied; torch warns about classes that the copy uses
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        return copy.deepcopy(program)


def caller(program: nn.Module, subject: Subject, *, flat: bool = False) -> ProgramCall:
    """Calls the source model or a program with its signature, or with `flat` a program that takes
    tensors in order. Outputs are copied: a later call may write into one that is a buffer.
    """

    def call(tensors: NamedTensors) -> list[Tensor]:
        copies = cloned(tensors)
        with torch.no_grad():
            if flat:
                result = program(*copies.values())
            else:
                result = call_source(program, subject.spec, copies)
        return [leaf.detach().clone() for leaf in leaves_of(result)]

    return call


def set_name(index: int, input_set: InputSet) -> str:
    """The name of an input set: its index and sizes."""
    name = f"input set {index}"
    sizes = sizes_text(input_set.point)
    return f"{name} ({sizes})" if sizes else name


def _problem(expected: Tensors, got: Tensors, subject: Subject) -> str | None:
    """Describe the first output that differs; None if all agree."""
    if len(got) != len(expected):
        return f"it gives {len(got)} tensors, expected {len(expected)}"
    outputs = zip(
        subject.outputs,
        expected,
        got,
        strict=True,
    )
    for output, right, tensor in outputs:
        difference = _difference(right, tensor.to(right.device))
        if difference:
            return f"output {output.name!r} {difference}"
    return None


def _difference(expected: Tensor, got: Tensor) -> str | None:
    """The difference of two tensors; None within the dtype's tolerance."""
    if same_bytes(expected, got):  # the usual case, and much faster than a median
        return None
    problem = structure_problem(values_of(expected), values_of(got))
    if problem is not None:
        return f"differs: {problem}"
    if not comparable(expected):
        return None
    right, other = in_double(expected), in_double(got)
    if expected.is_complex():
        right, other = torch.view_as_real(right), torch.view_as_real(other)
    sizes = right[right.isfinite() & (right != 0)].abs()
    median = float(sizes.median()) if sizes.numel() else 0.0  # a mask's -1e9 must not widen it
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCE)
    if torch.allclose(other, right, rtol=tolerance, atol=tolerance * median, equal_nan=True):
        return None
    difference = (right - other).abs().nan_to_num()  # Inf is at the same places
    return f"is off by up to {float(difference.max()):.3g}"


def first_lines(lines: Sequence[str]) -> str:
    """The first of many source lines."""
    more = ["others"] if len(lines) > _MAX_LINES else []
    return "at " + ", at ".join([*lines[:_MAX_LINES], *more])
