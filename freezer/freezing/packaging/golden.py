"""Golden files: the input sets that an artifact keeps, with the reference's outputs, for the canary and `verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS
from freezer.artifact.manifest import GoldenSet, counts_of, serving, set_for
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.validation.judge import Judgement, Trial
from freezer.runtime.tensors import save_tensors

GOLDEN_BYTES = 8 * 1024 * 1024
"""Limit on the size of the golden inputs; at least one set for each payload is kept."""


def write_golden(subject: Subject, judgement: Judgement, winner: Trial, folder: Path) -> tuple[GoldenSet, ...]:
    """Write golden/inputs.safetensors and golden/outputs.safetensors.

    Golden outputs are the reference, cast to the output's dtype. Where eager returns NaN, Inf or integers, they are eager's.
    """
    (folder / "golden").mkdir()
    rows = winner.drift.rows if winner.drift else ()
    native = {(row.set_index, row.output): row.native_rmse for row in rows if row.kind == "single" and row.native_rmse is not None}
    names = [output.name for output in subject.outputs]
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    sets: list[GoldenSet] = []
    for position, index in enumerate(golden_indices(subject, winner.candidate)):
        call = judgement.reference.singles[index]
        for name, tensor in subject.on_host.sets[index].tensors.items():
            inputs[f"{position}/{name}"] = tensor
        for name, reference, eager in zip(names, call.reference, call.eager, strict=True):
            outputs[f"{position}/{name}"] = _golden_output(reference, eager)
        known = {name: native[index, name] for name in names if (index, name) in native}
        sets.append(GoldenSet(point=dict(subject.sets[index].point), native_rmse=known))
    save_tensors(inputs, folder / GOLDEN_INPUTS)
    save_tensors(outputs, folder / GOLDEN_OUTPUTS)
    return tuple(sets)


def golden_indices(subject: Subject, candidate: Candidate) -> list[int]:
    """Select the first set at each point, the smallest first, within GOLDEN_BYTES; always one for each payload."""
    first: dict[tuple[tuple[str, int], ...], int] = {}
    for index, item in enumerate(subject.sets):
        first.setdefault(tuple(sorted(item.point.items())), index)
    sizes = {index: _bytes(subject.sets[index].tensors.values()) for index in first.values()}
    chosen: list[int] = []
    served: set[str] = set()
    total = 0
    for index in sorted(sizes, key=sizes.__getitem__):
        serves = _serving(candidate, subject.sets[index].point)
        if not serves <= served or total + sizes[index] <= GOLDEN_BYTES:
            chosen.append(index)
            served |= serves
            total += sizes[index]
    return sorted(chosen)


def _serving(candidate: Candidate, point: Mapping[str, int]) -> set[str]:
    """Paths of the payloads that serve a point, one for each thread count."""
    counts = counts_of(candidate.payloads) or (0,)
    found = [serving(set_for(candidate.payloads, count), point) for count in counts]
    return {payload.path for payload in found if payload is not None}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _golden_output(reference: Tensor, eager: Tensor) -> Tensor:
    if not (eager.is_floating_point() or eager.is_complex()):
        return eager
    return reference.to(eager.dtype).where(eager.isfinite() & reference.isfinite(), eager)
