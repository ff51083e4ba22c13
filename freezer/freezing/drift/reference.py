"""Reference: the float64 model and the eager model, over single calls and a sequence of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from freezer.codec import frozen
from freezer.compare import Magnitudes, distances
from freezer.errors import JudgeError
from freezer.freezing.drift.distributions import NUM_RUNS, Run, sampled
from freezer.freezing.drift.extremes import Extreme, extremes_of, normal_sets
from freezer.freezing.drift.runs import (
    Call,
    Runner,
    copied,
    run_calls,
    run_float64,
    schedule,
    source_runner,
)
from freezer.freezing.drift.ties import FEW
from freezer.freezing.models import (
    RESET,
    NamedTensors,
    Outputs,
    Subject,
    same_each_time,
    tensors_of,
)
from freezer.runtime.tensors import comparable, in_double, same_tensors, values_of


@frozen
class Reference:
    """All calls of a subject.

    Attributes:
        calls: the single calls in the order of the subject's sets, the sequence, and with a reset
            method one call after a reset.
        stateful: whether a call changes the outputs of later calls.
        deterministic: whether eager repeats its outputs.
        float64: whether the reference ran in float64.
        runs: elements to compare of each run of eager, if it is not deterministic.
        note: why it did not; None if it did.
        scales: for each output, the magnitudes from which values are judged apart; see
            `Magnitudes`.
        extremes: extreme sets with eager's answers; none if eager is not deterministic.
        normal: two sets of one size, for the calling protocol.
        warnings: which outputs compare nothing.
    """

    calls: Sequence[Call]
    stateful: bool
    deterministic: bool
    float64: bool
    note: str | None
    scales: Sequence[tuple[float, ...]]
    runs: Sequence[Run] = ()
    extremes: Sequence[Extreme] = ()
    normal: Sequence[Extreme] = ()
    warnings: Sequence[str] = ()

    @property
    def singles(self) -> list[Call]:
        """The single calls, in the order of the subject's sets."""
        return [call for call in self.calls if call.kind == "single"]


def run_reference(subject: Subject) -> Reference:
    """Run eager, eager again, and the float64 reference.

    Raises:
        JudgeError: the structure of the result varies between calls, or the reset method does not
            restore the initial state.
    """
    stateful, deterministic = _nature(subject)
    fresh = partial(_fresh_runner, subject)
    run_eager = partial(run_calls, fresh, subject, stateful=stateful)
    eagers = list(run_eager())
    if subject.reset is not None and deterministic:
        _check_reset(subject, eagers)
    noises, runs = _noise(eagers, run_eager, 0 if deterministic else NUM_RUNS - 1)
    wide, note = run_float64(subject.on_host, eagers, stateful=stateful)
    calls = []
    answers = zip(schedule(subject), wide or eagers, eagers, noises, strict=True)
    for (kind, set_index), r, e, noise in answers:
        calls.append(
            Call(
                kind=kind,
                set_index=set_index,
                reference=list(map(_within, r, e)),
                eager=e,
                noise_rmse=noise,
            )
        )
    outputs, normal = range(len(subject.outputs)), eagers[: len(subject.sets)]
    return Reference(
        calls=calls,
        stateful=stateful,
        deterministic=deterministic,
        float64=wide is not None,
        note=note,
        runs=runs,
        scales=[scales_of(calls, index, float64=wide is not None) for index in outputs],
        extremes=extremes_of(subject, stateful, normal) if deterministic else (),
        normal=normal_sets(subject, stateful) if deterministic else (),
        warnings=list(_warnings(subject, eagers)),
    )


def _warnings(subject: Subject, eagers: Outputs) -> Iterator[str]:
    """Warn of outputs whose drift cannot show."""
    for index, output in enumerate(subject.outputs):
        reason = _shows_nothing([e[index] for e in eagers[: len(subject.sets)]])
        if reason:
            yield f"output {output.name!r} {reason}: wrong values may not show; give other samples"


def _shows_nothing(outputs: Sequence[Tensor]) -> str | None:
    """Why the output of each set compares nothing; None if it does, or has too few elements."""
    first, *others = outputs
    if others and all(same_tensors(first, other) for other in others):
        return "is the same in every input set"
    values = torch.cat([in_double(output).flatten() for output in outputs])
    if not values.numel():
        return "is empty in every input set"
    if values.is_complex() or values.numel() <= FEW:
        return None
    low, high = values.aminmax()
    ends = ((values == low) | (values == high)).all()
    if ends and (comparable(first) or low == high):
        return f"has no values but {low:g} and {high:g}"
    return None


def _fresh_runner(subject: Subject) -> Runner:
    return source_runner(subject.fresh(), subject)


def _noise(
    eagers: Outputs,
    rerun: Callable[[], Iterator[list[Tensor]]],
    num_reruns: int,
) -> tuple[list[list[float]], list[Run]]:
    """For each call, by output, the largest rms difference of further runs from the first; and the
    elements to compare of every run.

    That of integers and bools is the largest of all calls, in each of which they may differ.
    """
    noises = [[0.0] * len(e) for e in eagers]
    runs = [sampled(eagers)] if num_reruns else []
    for _ in range(num_reruns):
        answers = list(rerun())
        runs.append(sampled(answers))
        for noise, e, answer in zip(
            noises,
            eagers,
            answers,
            strict=True,
        ):
            noise[:] = map(max, noise, map(_rms_difference, e, answer))
    for index, output in enumerate(eagers[0]):
        if comparable(output):
            continue
        largest = max(noise[index] for noise in noises)
        for noise in noises:
            noise[index] = largest
    return noises, runs


def _nature(subject: Subject) -> tuple[bool, bool]:
    """Whether eager is stateful, and whether it is deterministic.

    A model is stateful if a call changes one of its tensors, an output depends on earlier calls, or
    the subject has a reset method.
    """
    model = subject.fresh()
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    used = source_runner(model, subject)
    first_set = subject.sets[0].tensors
    last_set = subject.sets[-1].tensors
    first = copied(used.call(first_set))
    after = tensors_of(model)
    unchanged = all(
        name in after and same_tensors(tensor, after[name]) for name, tensor in before.items()
    )
    second = copied(used.call(first_set))
    last = copied(used.call(last_set))

    def repeats(answer: list[Tensor], tensors: NamedTensors) -> bool:
        """Whether a fresh copy gives an answer each time."""
        return same_each_time(lambda: _all_same(answer, _fresh_runner(subject).call(tensors)))

    deterministic = repeats(first, first_set)
    if deterministic and unchanged:
        last_alone = _fresh_runner(subject).call(last_set)
        deterministic = repeats(last_alone, last_set)
        unchanged = not deterministic or _all_same((*first, *last), (*second, *last_alone))
    return not unchanged or subject.reset is not None, deterministic


def _check_reset(
    subject: Subject,
    eagers: Outputs,
) -> None:
    """Compare eager's outputs after each reset with those of fresh copies.

    Raises:
        JudgeError: they differ; code CP-RESET.
    """
    for (kind, index), answer in zip(schedule(subject), eagers, strict=True):
        if kind == "sequence":
            continue
        if not _all_same(answer, _fresh_runner(subject).call(subject.sets[index].tensors)):
            raise JudgeError(
                f"{subject.name}: after {subject.reset}() the model answers input set {index}"
                " differently from a fresh copy; let it reset everything that forward changes, or"
                " call it before freezing",
                code=RESET,
            )


def scales_of(
    calls: Sequence[Call],
    index: int,
    *,
    float64: bool,
) -> tuple[float, ...]:
    """The magnitudes from which values of an output are judged apart, over all calls; see
    `Magnitudes`.
    """
    if not calls or not comparable(calls[0].eager[index]):
        return ()
    magnitudes = Magnitudes()
    for call in calls:
        e = values_of(call.eager[index])
        magnitudes.add(values_of(call.reference[index]), e if float64 else None)
    return magnitudes.limits(e.dtype)


def _all_same(
    some: Sequence[Tensor],
    others: Sequence[Tensor],
) -> bool:
    return all(map(same_tensors, some, others))


def _within(
    reference: Tensor,
    eager: Tensor,
) -> Tensor:
    """The reference; eager where it alone is finite, or where `torch.finfo(x.dtype).min` of float64
    exceeds its dtype.
    """
    if not comparable(eager) or reference.dtype == eager.dtype:
        return reference
    small = reference.abs() <= torch.finfo(eager.dtype).max
    beyond = eager.isfinite() & ~small
    return torch.where(beyond, eager.to(reference.dtype), reference)


def _rms_difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return 0.0
    return distances(values_of(other), values_of(one))[0].rmse
