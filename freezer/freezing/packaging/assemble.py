"""Assemble an artifact folder from a judged candidate: payloads, golden inputs and outputs, evidence, manifest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from freezer.artifact.folder import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MEDIA_JSON,
    MEDIA_PARQUET,
    MEDIA_SAFETENSORS,
    MEDIA_TEXT,
    OWN_OUTPUTS,
    Artifact,
    file_ref,
    write_artifact,
)
from freezer.artifact.manifest import FileRef, GoldenSet, Manifest, version_tuple
from freezer.artifact.payload_selection import counts_of, serving, set_for
from freezer.artifact.sections import ColdStart, DriftRecord, FreezingRecord, GateRecord, LatencyRecord, Needs, RecipeRecord
from freezer.files.atomic import link_or_copy
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.packaging import cold_start
from freezer.freezing.packaging.evidence import write_evidence, write_texts
from freezer.freezing.packaging.freezing_record import freezing_record
from freezer.freezing.recipes.recipes import EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.judge import Judgement, Trial
from freezer.hardware.cuda_requirements import cuda_needs
from freezer.runtime.fingerprint import host_fingerprint
from freezer.runtime.recorded_outputs import write_own_outputs
from freezer.runtime.tensor_files import save_tensors

GOLDEN_BYTES = 8 * 1024 * 1024
"""Golden sets are added, least first, while their tensors stay below this; at least one for each payload is kept."""


def assemble(
    subject: Subject,
    judgement: Judgement,
    target: Target,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> Artifact:
    """Write the winner's artifact folder, in one step.

    Args:
        subject, judgement, target: see `judge`; the judgement has a winner.
        dest: a new or empty folder.
        provenance: source, weights digest, campaign.
        failures: the error message of each recipe that made no candidate; recorded.
    """
    winner = judgement.winner
    assert winner is not None, "assemble is called with a winner"
    candidate = winner.candidate
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        for payload in candidate.payloads:
            link_or_copy(candidate.folder / payload.path, staging / payload.path)
        golden = write_golden(subject, judgement, candidate, staging)
        write_own_outputs([winner.answers[index] for index in _golden_indices(subject, candidate)], staging)
        files = [
            *((path, MEDIA_SAFETENSORS) for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS)),
            *((path, _table_type(path)) for path in write_evidence(judgement, staging)),
            *((path, MEDIA_TEXT) for path in write_texts(candidate, staging)),
        ]
        refs = tuple(file_ref(staging, path, media_type) for path, media_type in files)
        cold = _cold(subject, candidate, staging, target)
        record = freezing_record(judgement, winner, failures)
        manifest = _manifest(subject, judgement, winner, target, golden, refs, cold, provenance, record)
        staging.chmod(0o755)
        return write_artifact(manifest, staging, dest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _table_type(path: str) -> str:
    return MEDIA_PARQUET if path.endswith(".parquet") else MEDIA_JSON


def write_golden(subject: Subject, judgement: Judgement, candidate: Candidate, folder: Path) -> tuple[GoldenSet, ...]:
    """Write golden/inputs.safetensors and golden/outputs.safetensors.

    Golden outputs are the reference cast to the output's dtype; where eager is NaN or Inf, or gives integers, they are eager's.
    """
    (folder / "golden").mkdir()
    names = [output.name for output in subject.outputs]
    native = _native_rmse(judgement)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    sets: list[GoldenSet] = []
    for position, index in enumerate(_golden_indices(subject, candidate)):
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


def _golden_indices(subject: Subject, candidate: Candidate) -> list[int]:
    """Which sets become golden: the first at each point, least first, within GOLDEN_BYTES; always one for each payload."""
    first: dict[tuple[tuple[str, int], ...], int] = {}
    for index, item in enumerate(subject.sets):
        first.setdefault(tuple(sorted(item.point.items())), index)
    by_size = sorted(first.values(), key=lambda index: _bytes(subject.sets[index].tensors.values()))
    chosen: list[int] = []
    served: set[str] = set()
    total = 0
    for index in by_size:
        serves = _serving(candidate, subject.sets[index].point)
        size = _bytes(subject.sets[index].tensors.values())
        if not serves <= served or total + size <= GOLDEN_BYTES:
            chosen.append(index)
            served |= serves
            total += size
    return sorted(chosen)


def _serving(candidate: Candidate, point: Mapping[str, int]) -> set[str]:
    """The paths of the payloads that serve a point, one for each thread count."""
    counts = counts_of(candidate.payloads) or (0,)
    found = [serving(set_for(candidate.payloads, count), point) for count in counts]
    return {payload.path for payload in found if payload is not None}


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _golden_output(reference: Tensor, eager: Tensor) -> Tensor:
    if not (eager.is_floating_point() or eager.is_complex()):
        return eager
    return reference.to(eager.dtype).where(eager.isfinite() & reference.isfinite(), eager)


def _native_rmse(judgement: Judgement) -> dict[tuple[int, str], float]:
    """Of each input set and output, the eager model's error and noise, as the winner was held to it."""
    drift = judgement.winner.drift if judgement.winner else None
    rows = drift.rows if drift else ()
    return {(row.set_index, row.output): row.native_rmse for row in rows if row.kind == "single" and row.native_rmse is not None}


def _cold(subject: Subject, candidate: Candidate, staging: Path, target: Target) -> ColdStart:
    payload = candidate.payloads[0]
    return cold_start.measure(
        staging / payload.path,
        payload.kind,
        candidate.settings,
        staging / GOLDEN_INPUTS,
        spec=subject.spec,
        native=payload.convention == "native",
        num_threads=target.num_threads,
        device=str(target.device),
    )


def _manifest(
    subject: Subject,
    judgement: Judgement,
    winner: Trial,
    target: Target,
    golden: tuple[GoldenSet, ...],
    files: tuple[FileRef, ...],
    cold: ColdStart,
    provenance: Mapping[str, str],
    freezing: FreezingRecord,
) -> Manifest:
    candidate, reference = winner.candidate, judgement.reference
    assert winner.drift is not None, "a winner has passed the drift gate"
    torch_version = candidate.toolchain["torch"]
    return Manifest(
        model=subject.name,
        device_class=target.device_class.name,
        verdict=judgement.verdict,
        recipe=RecipeRecord(
            name=candidate.recipe,
            capture=candidate.capture,
            lowering=candidate.lowering,
            settings=candidate.settings,
            tried=candidate.tried,
            preserve=candidate.preserve,
            reset=subject.reset,
        ),
        inputs=subject.spec,
        outputs=subject.outputs,
        structure=subject.structure,
        stateful=reference.stateful,
        payloads=candidate.payloads,
        files=files,
        golden=golden,
        reference="float64" if reference.float64 else "eager",
        needs=Needs(
            torch=".".join(str(part) for part in version_tuple(torch_version)),
            machine=target.device_class.archspec,
            cuda=cuda_needs(target.device_class, candidate.toolchain["cuda"]),
        ),
        toolchain=candidate.toolchain,
        drift=DriftRecord(
            **winner.drift.summary(),
            reference_note=reference.why_not or reference.note,
            deterministic=reference.deterministic,
            task_metric={EAGER: judgement.task_metric, candidate.recipe: winner.task_metric},
        ),
        gate=GateRecord(error_ratio_max=judgement.limits.error_ratio_max, speedup_min=judgement.limits.speedup_min),
        latency=_latency(judgement, winner, target, cold),
        provenance={**provenance, "host": host_fingerprint(target.device)},
        freezing=freezing,
    )


def _latency(judgement: Judgement, winner: Trial, target: Target, cold: ColdStart) -> LatencyRecord | None:
    if judgement.sampling is None or judgement.eager_latency_ms is None or winner.latency_ms is None:
        return None
    faster = winner.speedup
    return LatencyRecord(
        point=judgement.point,
        num_threads=target.num_threads,
        eager_ms=judgement.eager_latency_ms,
        ms=winner.latency_ms,
        speedup=faster.value if faster else None,
        speedup_ci=(faster.low, faster.high) if faster else None,
        num_samples={name: len(judgement.sampling.pooled(name)) for name in judgement.sampling.samples_ms},
        num_dropped_rounds=judgement.sampling.num_dropped,
        settled=judgement.sampling.settled,
        policy=judgement.policy,
        cold_start=cold,
        points=winner.points,
        device=judgement.sampling.device or {},
    )
