"""Compare a captured program's answers with the eager model's, on every input set of the subject.

A trace keeps the branch and the Python numbers of its example and only warns; here the difference
shows before anything is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freezer.compare import structure_problem
from freezer.compare.tensor_values import comparable, in_double, values_of
from freezer.errors import CaptureError
from freezer.freezing.diagnostics.messages import run_sentence
from freezer.freezing.models import Subject, call_source, same_each_time
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import leaves_of, same_bytes

DIFFERS = "CP-TRACE-DIFFERS"
"""Code of a trace or script whose answers differ from its model's."""

SIZES = "CP-TRACE-SIZES"
"""Code of a trace for a range of sizes that was not proven at all of them."""

SIZES_LIMIT_S = 120
"""Time for proving a trace at every size of each dim."""

COMBINATIONS_LIMIT_S = 20
"""Time after which no further combinations of sizes are tried."""

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


def run_eager(subject: Subject) -> EagerAnswers:
    """Run the eager model once on each set, and a few times more to learn whether it is stateful or
    random.

    Raises:
        CaptureError: it fails on one of its sets.
    """
    sets = subject.sets

    def fresh() -> ProgramCall:
        return native_call(subject.fresh(), subject)

    model = subject.fresh()
    before = [buffer.clone() for buffer in model.buffers()]
    call = native_call(model, subject)
    answers: list[list[Tensor]] = []
    for index, item in enumerate(sets):
        try:
            answers.append(call(item.tensors))
        except Exception as error:
            raise _eager_fails(place_of(index, item), item, error) from error
    unchanged = all(
        same_bytes(one, other) for one, other in zip(before, model.buffers(), strict=True)
    )
    if unchanged and same_each_time(
        lambda: _problem(answers[0], call(sets[0].tensors), subject) is None
    ):
        return EagerAnswers(first=answers, second=None, deterministic=True)
    if not same_each_time(lambda: _problem(answers[0], fresh()(sets[0].tensors), subject) is None):
        return EagerAnswers(first=answers, second=None, deterministic=False)
    call = fresh()
    call(sets[0].tensors)
    second = call(sets[0].tensors)
    return EagerAnswers(
        first=[answers[0], *(fresh()(item.tensors) for item in sets[1:])],
        second=second,
        deterministic=True,
    )


def check_answers(
    what: str,
    fresh: Callable[[], ProgramCall],
    subject: Subject,
    eager: EagerAnswers,
    *,
    code: str = DIFFERS,
    why: Callable[[InputSet], str] = lambda _: "",
) -> tuple[str, ...]:
    """Compare a captured program with the eager model's answers.

    Args:
        what: name of the program in messages: `the trace`.
        fresh: makes the program in its initial state; called once if the model is stateless.
        subject, eager: the model and its answers.
        code: code of the error.
        why: a likely reason for a difference on a set, as the end of a sentence.

    Returns:
        A warning if the model is random, so that nothing was compared.

    Raises:
        CaptureError: the program fails, or an output's shape, dtype or values differ.
    """
    if not eager.deterministic:
        return (f"{what} was not compared with the model, whose answers to the same inputs differ",)
    call: ProgramCall | None = None
    for starts, place, item, expected in _calls(subject, eager):
        call = fresh() if call is None or starts else call
        problem, cause = _compared(expected, call, item, subject)
        if problem is not None:
            raise CaptureError(
                f"{what} differs from the model on {place}: {problem}{why(item)}", code=code
            ) from cause
    return ()


def check_sizes(
    fresh: Callable[[], ProgramCall],
    subject: Subject,
    eager: EagerAnswers,
    points: Sequence[Mapping[str, int]],
    num_needed: int,
    proven: Callable[[Mapping[str, int]], bool],
) -> int:
    """Compare a trace with the model, which is called for it, at further points.

    Args:
        fresh, subject, eager: see `check_answers`.
        points: in the order to try.
        num_needed: the first points, all of which are tried; the others until COMBINATIONS_LIMIT_S.
        proven: whether a point needs no comparison.

    Returns:
        The number of points that were tried.

    Raises:
        CaptureError: see `check_answers`; or the first points take longer than SIZES_LIMIT_S.
    """
    started = time.monotonic()
    model, call = native_call(subject.fresh(), subject), fresh()
    for number, point in enumerate(points):
        passed_s = time.monotonic() - started
        if number < num_needed and passed_s > SIZES_LIMIT_S:
            found = (
                f"the trace was proven at {number} of {num_needed} sizes within {SIZES_LIMIT_S} s"
            )
            raise CaptureError(
                f"{found}; declare fewer, or write forward so that torch.jit.script takes it",
                code=SIZES,
            )
        if number >= num_needed and passed_s > COMBINATIONS_LIMIT_S:
            return number
        if proven(point):
            continue
        item = subject.further_set(point)
        if not eager.deterministic:
            raise CaptureError(
                f"the trace cannot be compared with the model on {_sizes_of(item)}: its answers"
                " differ",
                code=SIZES,
            )
        if number and eager.second is not None:
            model, call = native_call(subject.fresh(), subject), fresh()
        try:
            expected = model(item.tensors)
        except Exception as error:
            raise _eager_fails(_sizes_of(item), item, error) from error
        problem, cause = _compared(expected, call, item, subject)
        if problem is not None:
            raise CaptureError(
                f"the trace differs from the model on {_sizes_of(item)}: {problem}", code=DIFFERS
            ) from cause
    return len(points)


def _compared(
    expected: Sequence[Tensor], call: ProgramCall, item: InputSet, subject: Subject
) -> tuple[str | None, Exception | None]:
    """How a program's answer differs or why it fails, with the exception; None if it agrees."""
    try:
        return _problem(expected, call(item.tensors), subject), None
    except Exception as error:
        return run_sentence(error), error


def _eager_fails(place: str, item: InputSet, error: Exception) -> CaptureError:
    remedy = (
        "; declare only sizes that it takes (`min`, `max`, `multiple_of`)" if item.point else ""
    )
    return CaptureError(f"the eager model fails on {place}: {run_sentence(error)}{remedy}")


def native_call(program: Any, subject: Subject) -> ProgramCall:
    """Calls the source model, or a program with the same signature."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        return _kept(leaves_of(call_source(program, subject.spec, given)))

    return call


def flat_call(program: Any) -> ProgramCall:
    """Calls a program with its tensors in order."""

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return _kept(program(*(tensor.clone() for tensor in tensors.values())))

    return call


def _calls(
    subject: Subject, eager: EagerAnswers
) -> Iterator[tuple[bool, str, InputSet, Sequence[Tensor]]]:
    """For each call: whether the program starts in its initial state, the name of the call, its
    inputs, the expected answer.
    """
    for index, (item, expected) in enumerate(zip(subject.sets, eager.first, strict=True)):
        yield eager.second is not None, place_of(index, item), item, expected
    if eager.second is not None:
        item = subject.sets[0]
        yield True, place_of(0, item), item, eager.first[0]
        yield False, f"the second call with {place_of(0, item)}", item, eager.second


def place_of(index: int, item: InputSet) -> str:
    """The name of an input set: its index and sizes."""
    sizes = _sizes_of(item)
    return f"input set {index} ({sizes})" if sizes else f"input set {index}"


def _sizes_of(item: InputSet) -> str:
    return ", ".join(f"{name}={size}" for name, size in item.point.items())


def _problem(expected: Sequence[Tensor], got: Sequence[Tensor], subject: Subject) -> str | None:
    """Describe the first output that differs; None if all agree."""
    if len(got) != len(expected):
        return f"it gives {len(got)} tensors, expected {len(expected)}"
    differences = map(_difference, expected, got)
    return next(
        (
            f"output {output.name!r} {text}"
            for output, text in zip(subject.outputs, differences, strict=True)
            if text
        ),
        None,
    )


def _difference(expected: Tensor, got: Tensor) -> str | None:
    """The difference of two tensors; None within the dtype's tolerance."""
    if same_bytes(
        expected, got
    ):  # as most captures answer, and much faster than the median of large outputs
        return None
    if (problem := structure_problem(values_of(expected), values_of(got))) is not None:
        return f"differs: {problem}"
    if not comparable(expected):
        return None
    one, other = in_double(expected), in_double(got)
    if expected.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    finite = torch.isfinite(one) & torch.isfinite(other)
    one, other = one[finite], other[finite]
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCE)
    sizes = one.abs()[one != 0]
    allowed = tolerance * (
        one.abs() + (sizes.median() if sizes.numel() else 0.0)
    )  # a mask's -1e9 must not widen the tolerance
    apart = (one - other).abs()
    return f"is off by up to {float(apart.max()):.3g}" if bool((apart > allowed).any()) else None


def first_lines(lines: Sequence[str]) -> str:
    """The first of many places."""
    more = f" and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    return f"at {', at '.join(lines[:_MAX_LINES])}{more}"


def _kept(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies: a later call may write into an output that is a buffer."""
    return [leaf.detach().clone() for leaf in leaves]
