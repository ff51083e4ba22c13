"""Compare a captured program's answers with the eager model's, on every input set of the subject.

A trace keeps the branch and the Python numbers of its example and only warns; here the difference
shows before anything is built.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freezer.compare import structure_problem
from freezer.compare.tensor_values import comparable, in_double, values_of
from freezer.errors import CaptureError
from freezer.freezing.diagnostics import run_sentence
from freezer.freezing.models import Subject, call_source, same_each_time
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import leaves_of, same_bytes

DIFFERS = "CP-CAPTURE-DIFFERS"
"""Code of a program whose answers differ from its model's."""

SIZES = "CP-TRACE-SIZES"
"""Code of a trace for a range of sizes that was not proven at all of them."""

SIZES_LIMIT_S = 10
"""Time for comparing a trace at further sizes."""

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

ProgramCall = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""Runs a program on an input set; returns tensors in the order of the subject's outputs."""


class Program(Protocol):
    """A model, or a program made of one."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerAnswers:
    """The eager model's answers.

    Attributes:
        first: answer to each input set of the subject, from the initial state.
        second: answer to the first set right after its first answer; None if a call changes
            nothing.
        deterministic: whether it answers the same twice from the same state; otherwise nothing can
            be compared with it.
    """

    first: Sequence[Sequence[Tensor]]
    second: Sequence[Tensor] | None
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class Original:
    """What is captured: a model for some sizes.

    Attributes:
        subject: the model, with input sets at these sizes only.
        point: the only sizes that the graph is for; None for all.
    """

    subject: Subject
    point: Mapping[str, int] | None

    @functools.cached_property
    def eager(self) -> EagerAnswers:
        """The eager model's answers, computed when first needed."""
        return run_eager(self.subject)

    def fresh_call(self) -> ProgramCall:
        """Calls the model from its initial state."""
        return native_call(self.subject.fresh(), self.subject)


def run_eager(subject: Subject) -> EagerAnswers:
    """Run the eager model once on each set, and a few times more to learn whether it is stateful or
    random.

    Raises:
        CaptureError: it fails on one of its sets.
    """
    first, *others = subject.sets
    model = subject.fresh()
    before = [buffer.clone() for buffer in model.buffers()]
    call = native_call(model, subject)
    answers = [
        _eager_answer(call, set_name(index, input_set), input_set)
        for index, input_set in enumerate(subject.sets)
    ]
    unchanged = all(map(same_bytes, before, model.buffers()))

    def same_answer(call: ProgramCall) -> bool:
        return _problem(answers[0], call(first.tensors), subject) is None

    def fresh() -> ProgramCall:
        return native_call(subject.fresh(), subject)

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
    fresh: Callable[[], ProgramCall],
    original: Original,
    *,
    why: Callable[[InputSet], str] = lambda _: "",
) -> tuple[str, ...]:
    """Compare a captured program with the eager model's answers.

    Args:
        what: name of the program in messages: `the trace`.
        fresh: makes the program in its initial state; called once if the model is stateless.
        original: the model and its answers.
        why: a likely reason for a difference on a set, as the end of a sentence.

    Returns:
        A warning if the model is random, so that nothing was compared.

    Raises:
        CaptureError: the program fails, or an output's shape, dtype or values differ.
    """
    if not original.eager.deterministic:
        return (f"{what} was not compared with the model, whose answers to the same inputs differ",)
    call: ProgramCall | None = None
    for starts, name, input_set, expected in _calls(original):
        call = fresh() if call is None or starts else call
        reason = why(input_set)
        _compare(what, name, expected, call, input_set, original.subject, reason)
    return ()


def check_sizes(
    fresh: Callable[[], ProgramCall],
    original: Original,
    points: Sequence[Mapping[str, int]],
    num_needed: int,
) -> int:
    """Compare a trace with the model, which is called for it, at further points within
    SIZES_LIMIT_S.

    Args:
        fresh: makes the trace in its initial state.
        original: the model.
        points: sizes in the order to compare.
        num_needed: number of the first points that must all be compared.

    Returns:
        The number of points that were compared.

    Raises:
        CaptureError: see `check_answers`; or the first points take longer than the limit.
    """
    subject, ends = original.subject, time.monotonic() + SIZES_LIMIT_S
    model, call = original.fresh_call(), fresh()
    for number, point in enumerate(points):
        if time.monotonic() > ends:
            if number >= num_needed:
                return number
            why = f"was compared at {number} of {num_needed} sizes within {SIZES_LIMIT_S} s"
            remedy = "declare fewer, or write forward so that torch.jit.script takes it"
            raise CaptureError(f"the trace {why}; {remedy}", code=SIZES)
        input_set = subject.further_set(point)
        sizes = _sizes_of(input_set)
        if not original.eager.deterministic:
            why = "cannot be compared with the model on"
            raise CaptureError(f"the trace {why} {sizes}: its answers differ", code=SIZES)
        if number and original.eager.second is not None:
            model, call = original.fresh_call(), fresh()
        expected = _eager_answer(model, sizes, input_set)
        _compare("the trace", sizes, expected, call, input_set, subject)
    return len(points)


def _compare(
    what: str,
    name: str,
    expected: Sequence[Tensor],
    call: ProgramCall,
    input_set: InputSet,
    subject: Subject,
    reason: str = "",
) -> None:
    """Raise CaptureError if a program fails on an input set, or answers differently."""
    cause = None
    try:
        problem = _problem(expected, call(input_set.tensors), subject)
    except Exception as error:
        problem, cause = run_sentence(error), error
    if problem is not None:
        message = f"{what} differs from the model on {name}: {problem}{reason}"
        raise CaptureError(message, code=DIFFERS) from cause


def _eager_answer(call: ProgramCall, name: str, input_set: InputSet) -> list[Tensor]:
    try:
        return call(input_set.tensors)
    except Exception as error:
        remedy = "; declare only sizes that it takes (`min`, `max`, `multiple_of`)"
        raise CaptureError(
            f"the eager model fails on {name}: {run_sentence(error)}"
            f"{remedy if input_set.point else ''}"
        ) from error


def native_call(program: Program, subject: Subject) -> ProgramCall:
    """Calls the source model, or a program with the same signature."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return _copies(leaves_of(call_source(program, subject.spec, copies)))

    return call


def flat_call(program: Callable[..., Sequence[Tensor]]) -> ProgramCall:
    """Calls a program with its tensors in order."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return _copies(program(*(tensor.clone() for tensor in tensors.values())))

    return call


def _copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies of outputs: a later call may write into an output that is a buffer."""
    return [leaf.detach().clone() for leaf in leaves]


def _calls(original: Original) -> Iterator[tuple[bool, str, InputSet, Sequence[Tensor]]]:
    """For each call: whether the program starts in its initial state, the name of the call, its
    inputs, the expected answer.
    """
    sets, eager = original.subject.sets, original.eager
    for index, (input_set, expected) in enumerate(zip(sets, eager.first, strict=True)):
        yield eager.second is not None, set_name(index, input_set), input_set, expected
    if eager.second is not None:
        name = set_name(0, sets[0])
        yield True, name, sets[0], eager.first[0]
        yield False, f"the second call with {name}", sets[0], eager.second


def set_name(index: int, input_set: InputSet) -> str:
    """The name of an input set: its index and sizes."""
    sizes = _sizes_of(input_set)
    return f"input set {index} ({sizes})" if sizes else f"input set {index}"


def _sizes_of(input_set: InputSet) -> str:
    return ", ".join(f"{name}={size}" for name, size in input_set.point.items())


def _problem(expected: Sequence[Tensor], got: Sequence[Tensor], subject: Subject) -> str | None:
    """Describe the first output that differs; None if all agree."""
    if len(got) != len(expected):
        return f"it gives {len(got)} tensors, expected {len(expected)}"
    for output, right, tensor in zip(subject.outputs, expected, got, strict=True):
        difference = _difference(right, tensor)
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
    finite = torch.isfinite(right) & torch.isfinite(other)
    right, other = right[finite], other[finite]
    sizes = right.abs()[right != 0]
    median = sizes.median() if sizes.numel() else 0.0  # a mask's -1e9 must not widen the tolerance
    allowed = _TOLERANCES.get(expected.dtype, _TOLERANCE) * (right.abs() + median)
    apart = (right - other).abs()
    return f"is off by up to {float(apart.max()):.3g}" if bool((apart > allowed).any()) else None


def first_lines(lines: Sequence[str]) -> str:
    """The first of many source lines."""
    more = f" and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    return f"at {', at '.join(lines[:_MAX_LINES])}{more}"
