"""What candidates are held against: the float64 reference and the eager model, over single calls and a sequence of calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freezer.errors import JudgeError
from freezer.outputs import flatten
from freezer.subject import Subject, call_source

SEQUENCE_CALLS = 4
"""docs/measuring.md: a sequence of at least 4 calls on one instance; state that freezing baked in shows only there."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCall:
    """One call, by the reference and by eager."""

    kind: Literal["single", "sequence"]
    set_index: int
    reference: Sequence[Tensor]
    eager: Sequence[Tensor]
    noise_rmse: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """All calls of a subject.

    Attributes:
        calls: the single calls in the order of the subject's sets, then the sequence.
        stateful: whether a call changes what later calls answer.
        deterministic: whether eager gives the same twice.
        float64: whether the reference ran in float64; `why_not` says why it did not.
    """

    calls: tuple[ReferenceCall, ...]
    stateful: bool
    deterministic: bool
    float64: bool
    why_not: str | None

    @property
    def singles(self) -> tuple[ReferenceCall, ...]:
        """The single calls, in the order of the subject's sets."""
        return tuple(call for call in self.calls if call.kind == "single")


Runner = Callable[[Mapping[str, Tensor]], list[Tensor]]


def run_calls(fresh: Callable[[], Runner], subject: Subject, *, stateful: bool) -> list[tuple[str, int, list[Tensor]]]:
    """Make every single call and the sequence: kind, index of the input set, output tensors.

    Args:
        fresh: gives a runner in its initial state.
        subject: whose sets are the inputs.
        stateful: take a fresh runner for every single call.
    """
    results: list[tuple[str, int, list[Tensor]]] = []
    runner = fresh()
    for index, item in enumerate(subject.sets):
        if stateful and index:
            runner = fresh()
        results.append(("single", index, _kept(runner(item.tensors))))
    runner = fresh() if stateful else runner
    for index in sequence_of(len(subject.sets)):
        results.append(("sequence", index, _kept(runner(subject.sets[index].tensors))))
    return results


def sequence_of(num_sets: int) -> list[int]:
    """Which sets the sequence calls with: the first again and again between others, so that state shows as a difference."""
    return [0 if position % 2 == 0 else min((position + 1) // 2, num_sets - 1) for position in range(SEQUENCE_CALLS)]


def run_reference(subject: Subject) -> Reference:
    """Run eager, eager again, and the float64 reference."""
    stateful, deterministic = _nature(subject)

    def eager() -> Runner:
        return _source_runner(subject.fresh(), subject)

    eagers = run_calls(eager, subject, stateful=stateful)
    again = eagers if deterministic else run_calls(eager, subject, stateful=stateful)
    wide, why_not = _run_float64(subject, eagers, stateful=stateful)
    calls = []
    for (kind, index, e), (_, _, e2), (_, _, r) in zip(eagers, again, wide or eagers, strict=True):
        noise = [_rms_difference(one, other) for one, other in zip(e, e2, strict=True)]
        calls.append(ReferenceCall(kind=kind, set_index=index, reference=r, eager=e, noise_rmse=noise))  # type: ignore[arg-type]
    return Reference(calls=tuple(calls), stateful=stateful, deterministic=deterministic, float64=wide is not None, why_not=why_not)


def _nature(subject: Subject) -> tuple[bool, bool]:
    """Whether eager is stateful, and whether it is deterministic."""
    inputs = subject.sets[0].tensors
    model, other = subject.fresh(), subject.fresh()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    first = _kept(_source_runner(model, subject)(inputs))
    after = model.state_dict()
    changed = any(not _same(tensor, after[name]) for name, tensor in state.items())
    second = _kept(_source_runner(model, subject)(inputs))
    elsewhere = _kept(_source_runner(other, subject)(inputs))
    deterministic = all(_same(a, b) for a, b in zip(first, elsewhere, strict=True))
    stateful = changed or (deterministic and not all(_same(a, b) for a, b in zip(first, second, strict=True)))
    return stateful, deterministic


def _run_float64(subject: Subject, eagers: Sequence[tuple[str, int, list[Tensor]]], *, stateful: bool) -> tuple[Any, str | None]:
    """The calls in float64, or None and the reason why it cannot run."""

    def fresh() -> Runner:
        return _source_runner(subject.fresh().double(), subject, wide=True)

    try:
        results = run_calls(fresh, subject, stateful=stateful)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return None, f"float64 does not run: {type(error).__name__}: {lines[0]}"
    for (_, _, wide), (_, _, narrow) in zip(results, eagers, strict=True):
        for r, e in zip(wide, narrow, strict=True):
            if r.shape != e.shape:
                return None, f"float64 gives shape {list(r.shape)}, eager {list(e.shape)}"
            if (e.is_floating_point() and r.dtype != torch.float64) or (e.is_complex() and r.dtype != torch.complex128):
                return None, f"forward casts to {r.dtype}, so no float64 output is had"
    return results, None


def _source_runner(model: nn.Module, subject: Subject, *, wide: bool = False) -> Runner:
    def run(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        # Clones: a model that writes into its inputs must not change them for the others.
        given = {name: _widen(tensor) if wide else tensor.clone() for name, tensor in tensors.items()}
        structure, leaves = flatten(call_source(model, subject.spec, given))
        if not wide and structure != subject.structure:
            raise JudgeError(
                f"{subject.name}: the result's form, or a constant in it, changes from call to call, which none follows; got "
                f"{structure.to_json()}, expected {subject.structure.to_json()}; return tensors instead",
                code="CP-OUTPUTS",
            )
        return leaves

    return run


def _widen(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.to(torch.float64)
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.clone()


def _kept(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides: a later call may write into an output that aliases a buffer."""
    return [leaf.detach().clone(memory_format=torch.preserve_format) for leaf in leaves]


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one[~one.isnan()], other[~other.isnan()])
    )


def _rms_difference(one: Tensor, other: Tensor) -> float:
    if one is other or not (one.is_floating_point() or one.is_complex()) or one.shape != other.shape or one.numel() == 0:
        return 0.0
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    return math.sqrt(float((difference[torch.isfinite(difference)] ** 2).mean().nan_to_num()))
