"""Reference: the float64 model and the eager model, over single calls and a sequence of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from freezer.codec import encode
from freezer.compare.gate import DIGITS, blocks
from freezer.compare.numerics import comparable, distances, in_double, same_tensors
from freezer.errors import JudgeError, first_line
from freezer.freezing.drift.distributions import NUM_RUNS, Run, sampled
from freezer.freezing.drift.drift import Call, CallKind, scales_of
from freezer.freezing.drift.float64_mode import Widening, own_dtype, widening
from freezer.freezing.models import RESET, Subject, call_source, same_each_time, tensors_of
from freezer.runtime.tensors import flatten

SEQUENCE_CALLS = 4
"""Calls on one instance; state that freezing baked in shows only there."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """All calls of a subject.

    Attributes:
        calls: the single calls in the order of the subject's sets, the sequence, and with a reset
            method one call after a reset.
        stateful: whether a call changes the outputs of later calls.
        deterministic: whether eager repeats its outputs.
        float64: whether the reference ran in float64.
        runs: what is compared of each run of eager, if it is not deterministic.
        note: why it did not; or else which casts were widened for that, and which roundings of the
            model remain.
        scales: for each output, the magnitudes from which values are judged apart; see
            `Magnitudes`.
    """

    calls: tuple[Call, ...]
    stateful: bool
    deterministic: bool
    float64: bool
    note: str | None
    scales: tuple[tuple[float, ...], ...]
    runs: tuple[Run, ...] = ()

    @property
    def singles(self) -> tuple[Call, ...]:
        """The single calls, in the order of the subject's sets."""
        return tuple(call for call in self.calls if call.kind == "single")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One instance to compare.

    Attributes:
        call: takes input tensors by path, returns the output tensors in order.
        reset: the subject's reset method, if it has one.
    """

    call: Callable[[Mapping[str, Tensor]], list[Tensor]]
    reset: Callable[[], object] | None = None


def schedule(subject: Subject) -> list[tuple[CallKind, int]]:
    """Kind and index of the input set of every call: the single calls, the sequence, and with a
    reset method a last call.

    The sequence has the first set between others, so that state shows as a difference.
    """
    last = len(subject.sets) - 1
    sequence = [
        0 if position % 2 == 0 else min((position + 1) // 2, last)
        for position in range(SEQUENCE_CALLS)
    ]
    return [
        *(("single", index) for index in range(len(subject.sets))),
        *(("sequence", index) for index in sequence),
        *((("after-reset", 0),) if subject.reset is not None else ()),
    ]


def run_calls(
    fresh: Callable[[], Runner], subject: Subject, *, stateful: bool
) -> Iterator[list[Tensor]]:
    """Make the calls of `schedule` one by one; yield the output tensors of each.

    Each single call, the sequence and the call after it start from the initial state. With a reset
    method one instance is reset.

    Args:
        fresh: returns a runner in its initial state.
        subject: its sets are the inputs.
        stateful: without a reset method, use a fresh runner for each call.
    """
    runner, previous = fresh(), None
    for kind, index in schedule(subject):
        if previous and not kind == previous == "sequence":
            if runner.reset is not None:
                runner.reset()
            elif stateful:
                runner = fresh()
        yield _kept(runner.call(subject.sets[index].tensors))
        previous = kind


def run_reference(subject: Subject) -> Reference:
    """Run eager, eager again, and the float64 reference.

    Raises:
        JudgeError: the structure of the result varies between calls, or the reset method does not
            restore the initial state.
    """
    stateful, deterministic = _nature(subject)

    def eager() -> Runner:
        return source_runner(subject.fresh(), subject)

    eagers = list(run_calls(eager, subject, stateful=stateful))
    if subject.reset is not None and deterministic:
        _check_reset(subject, eagers)
    further = (
        ()
        if deterministic
        else (run_calls(eager, subject, stateful=stateful) for _ in range(NUM_RUNS - 1))
    )
    noises, runs = _noise(eagers, further)
    wide, note = _run_float64(subject.on_host, eagers, stateful=stateful)
    calls = []
    for (kind, index), e, r, noise in zip(
        schedule(subject), eagers, wide or eagers, noises, strict=True
    ):
        kept = [_within(wide_one, one) for wide_one, one in zip(r, e, strict=True)]
        calls.append(Call(kind=kind, set_index=index, reference=kept, eager=e, noise_rmse=noise))
    found = None
    if wide is not None and deterministic and (names := _without_digits(subject, calls)):
        found = (
            f"eager has no correct digits in {names} (error above {DIGITS:.0%}), so the bounds are"
            " against eager there"
        )
    random = [
        repr(output.name)
        for output, by_call in zip(subject.outputs, zip(*noises, strict=True), strict=True)
        if any(by_call)
    ]
    if random:
        found = (
            f"{', '.join(random)} differ from run to run, so the distributions over {NUM_RUNS} runs"
            " are compared too"
        )
    return Reference(
        calls=tuple(calls),
        stateful=stateful,
        deterministic=deterministic,
        float64=wide is not None,
        note="; ".join(filter(None, (note, found))) or None,
        runs=runs,
        scales=tuple(
            scales_of(calls, index, float64=wide is not None)
            for index in range(len(subject.outputs))
        ),
    )


def _noise(
    eagers: Sequence[list[Tensor]], further: Iterable[Iterable[list[Tensor]]]
) -> tuple[list[list[float]], tuple[Run, ...]]:
    """For each call, by output, the largest rms difference of further runs from the first; and what
    to compare of every run.

    That of integers and bools is the largest of all calls, in each of which they may differ.
    """
    noises, runs = [[0.0] * len(e) for e in eagers], []
    for run in map(list, further):
        runs.append(sampled(run))
        noises = [
            list(map(max, known, map(_rms_difference, e, other)))
            for known, e, other in zip(noises, eagers, run, strict=True)
        ]
    drawn = {
        index: max(by_call)
        for index, by_call in enumerate(zip(*noises, strict=True))
        if not comparable(eagers[0][index])
    }
    noises = [
        [drawn.get(index, noise) for index, noise in enumerate(by_output)] for by_output in noises
    ]
    return noises, (sampled(eagers), *runs) if runs else ()


def _without_digits(subject: Subject, calls: Sequence[Call]) -> str:
    """The names of the outputs whose error by eager exceeds DIGITS."""
    names = []
    for index, output in enumerate(subject.outputs):
        if comparable(calls[0].eager[index]):
            found = [distances(call.reference[index], call.eager[index])[0] for call in calls]
            if sum(sums.noise for sums in found) > DIGITS**2 * sum(sums.signal for sums in found):
                names.append(repr(output.name))
    return ", ".join(names)


def _nature(subject: Subject) -> tuple[bool, bool]:
    """Whether eager is stateful, and whether it is deterministic.

    A model is stateful if a call changes one of its tensors, an output depends on earlier calls, or
    the subject has a reset method.
    """
    model = subject.fresh()
    state = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    used, first_set, last_set = (
        source_runner(model, subject),
        subject.sets[0].tensors,
        subject.sets[-1].tensors,
    )
    first = _kept(used.call(first_set))
    after = tensors_of(model)
    changed = any(
        name not in after or not same_tensors(tensor, after[name]) for name, tensor in state.items()
    )
    second = _kept(used.call(first_set))
    last = _kept(used.call(last_set))

    def alone(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return _kept(source_runner(subject.fresh(), subject).call(tensors))

    deterministic = same_each_time(lambda: _all_same(first, alone(first_set)))
    if deterministic and not changed:
        last_alone = alone(last_set)
        deterministic = same_each_time(lambda: _all_same(last_alone, alone(last_set)))
        changed = deterministic and not (_all_same(first, second) and _all_same(last, last_alone))
    return changed or subject.reset is not None, deterministic


def _check_reset(subject: Subject, eagers: Sequence[list[Tensor]]) -> None:
    """Compare eager's outputs after each reset with those of fresh copies.

    Raises:
        JudgeError: they differ; code CP-RESET.
    """
    for (kind, index), got in zip(schedule(subject), eagers, strict=True):
        if kind == "sequence":
            continue
        if not _all_same(
            got, source_runner(subject.fresh(), subject).call(subject.sets[index].tensors)
        ):
            raise JudgeError(
                f"{subject.name}: after {subject.reset}() the model answers input set {index}"
                " differently from a fresh copy; let it reset everything that forward changes, or"
                " call it before freezing",
                code=RESET,
            )


def _run_float64(
    subject: Subject, eagers: Sequence[list[Tensor]], *, stateful: bool
) -> tuple[list[list[Tensor]] | None, str | None]:
    """The calls in float64 or None, and a note on how it ran, or why it cannot.

    If the model does not run with its own casts widened, only its weights and inputs are float64,
    and the note says so.
    """
    mode = Widening(
        own_dtype(subject.model, (getattr(torch, item.dtype) for item in subject.spec.tensors))
    )
    results, why_not = _wide_calls(subject, eagers, mode, stateful=stateful)
    if mode.why_not:
        return None, mode.why_not
    if results is not None:
        return results, mode.note
    results, _ = _wide_calls(subject, eagers, None, stateful=stateful)
    return (
        results,
        why_not if results is None else f"casts within forward are not widened: {why_not}",
    )


def _wide_calls(
    subject: Subject, eagers: Sequence[list[Tensor]], mode: Widening | None, *, stateful: bool
) -> tuple[list[list[Tensor]] | None, str | None]:
    """The calls in float64, or None and the reason why they cannot run."""

    def fresh() -> Runner:
        model = subject.fresh().double()
        if mode is not None:
            mode.widen_attributes(model)
        return source_runner(model, subject, wide=True, mode=mode)

    try:
        results = list(run_calls(fresh, subject, stateful=stateful))
    except Exception as error:
        return None, f"float64 does not run: {type(error).__name__}: {first_line(error)}"
    for r, e in zip(chain(*results), chain(*eagers), strict=True):
        if r.shape != e.shape:
            return None, f"float64 gives shape {list(r.shape)}, eager {list(e.shape)}"
        if comparable(e) and r.dtype != (torch.complex128 if e.is_complex() else torch.float64):
            return None, f"forward casts to {r.dtype}, so it has no float64 output"
    return results, None


def source_runner(
    model: nn.Module, subject: Subject, *, wide: bool = False, mode: Widening | None = None
) -> Runner:
    """A runner of a copy of the source model; with `wide` its inputs become float64, and `mode`
    widens what it asks for.
    """

    def run(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        # clones, because a model may write into its inputs
        given = {
            name: in_double(tensor) if wide and comparable(tensor) else tensor.clone()
            for name, tensor in tensors.items()
        }
        with widening(mode) if mode else contextlib.nullcontext():
            result = call_source(model, subject.spec, given)
        structure, leaves = flatten(result)
        if not wide and structure != subject.structure:
            raise JudgeError(
                f"{subject.name}: the structure of the result, or a constant in it, changes from"
                f" call to call; got {encode(structure)}, expected {encode(subject.structure)};"
                " return tensors instead",
                code="CP-OUTPUTS",
            )
        return [leaf.cpu() for leaf in leaves]  # outputs are compared on the CPU

    def reset() -> None:
        try:
            with torch.no_grad(), widening(mode) if mode else contextlib.nullcontext():
                getattr(model, str(subject.reset))()
                if wide:
                    model.double()  # a reset may create buffers of the source's own dtype
        except Exception as error:
            raise JudgeError(
                f"{subject.name}: {subject.reset}() raises {type(error).__name__}: {error}",
                code=RESET,
            ) from error

    return Runner(call=run, reset=None if subject.reset is None else reset)


def _kept(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides, because a later call may write into an output that aliases a
    buffer.
    """
    return [leaf.detach().clone(memory_format=torch.preserve_format) for leaf in leaves]


def _all_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(same_tensors(one, other) for one, other in zip(some, others, strict=True))


def _within(reference: Tensor, eager: Tensor) -> Tensor:
    """The reference; eager where it alone is finite, or where `torch.finfo(x.dtype).min` of float64
    exceeds its dtype.
    """
    if not comparable(eager) or reference.dtype == eager.dtype:
        return reference
    largest = torch.finfo(eager.dtype).max
    if all(bool((reference[block].abs() <= largest).all()) for block in blocks(reference.shape)):
        return reference
    beyond = eager.isfinite() & ~(reference.abs() <= largest)
    return torch.where(beyond, eager.to(reference.dtype), reference)


def _rms_difference(one: Tensor, other: Tensor) -> float:
    return distances(other, one)[0].rmse if one.shape == other.shape else 0.0
