"""Assemble an artifact folder from a judged candidate: payloads, golden files, evidence, manifest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
from freezer.artifact.sections import ColdStart, DriftRecord, FreezingRecord, GateRecord, LatencyRecord, Needs, RecipeRecord
from freezer.files.atomic import link_or_copy
from freezer.freezing.models.subject import Subject
from freezer.freezing.packaging.cold_start import measure
from freezer.freezing.packaging.evidence import write_evidence, write_texts
from freezer.freezing.packaging.freezing_record import freezing_record
from freezer.freezing.packaging.golden import golden_indices, write_golden
from freezer.freezing.recipes.recipes import EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.judge import Judgement, Trial
from freezer.hardware.device_classes import cuda_needs
from freezer.runtime.devices import host_fingerprint
from freezer.runtime.tensors import write_own_outputs


def assemble(
    subject: Subject,
    judgement: Judgement,
    target: Target,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> Artifact:
    """Write the winner's artifact folder atomically.

    Args:
        subject, judgement, target: see `judge`; the judgement has a winner.
        dest: a new or empty folder.
        provenance: source, weights digest, campaign.
        failures: the error message of each recipe that made no candidate; recorded.

    Raises:
        JudgeError: a fresh process cannot serve the payload.
    """
    winner = judgement.winner
    assert winner is not None, "assemble requires a winner"
    candidate = winner.candidate
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        for payload in candidate.payloads:
            link_or_copy(candidate.folder / payload.path, staging / payload.path)
        written = _Written(
            golden=write_golden(subject, judgement, winner, staging),
            files=_write_files(subject, judgement, winner, staging),
            cold_start=measure(
                staging,
                candidate.payloads[0],
                candidate.settings,
                spec=subject.spec,
                num_threads=target.num_threads,
                device=str(target.device),
            ),
            freezing=freezing_record(judgement, winner, failures),
        )
        manifest = _manifest(subject, judgement, winner, target, written, provenance)
        staging.chmod(0o755)
        return write_artifact(manifest, staging, dest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What the manifest lists besides the judgement."""

    golden: tuple[GoldenSet, ...]
    files: tuple[FileRef, ...]
    cold_start: ColdStart
    freezing: FreezingRecord


def _write_files(subject: Subject, judgement: Judgement, winner: Trial, staging: Path) -> tuple[FileRef, ...]:
    """Write the evidence; return references to it and to the golden files."""
    write_own_outputs([winner.answers[index] for index in golden_indices(subject, winner.candidate)], staging)
    tables, texts = write_evidence(judgement, staging), write_texts(winner.candidate, staging)
    files = [
        *((path, MEDIA_SAFETENSORS) for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS)),
        *((path, MEDIA_PARQUET if path.endswith(".parquet") else MEDIA_JSON) for path in tables),
        *((path, MEDIA_TEXT) for path in texts),
    ]
    return tuple(file_ref(staging, path, media_type) for path, media_type in files)


def _manifest(
    subject: Subject, judgement: Judgement, winner: Trial, target: Target, written: _Written, provenance: Mapping[str, str]
) -> Manifest:
    candidate, reference = winner.candidate, judgement.reference
    assert winner.drift is not None, "a winner has passed the drift gate"
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
        files=written.files,
        golden=written.golden,
        reference="float64" if reference.float64 else "eager",
        needs=Needs(
            torch=".".join(str(part) for part in version_tuple(candidate.toolchain["torch"])),
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
        latency=_latency(judgement, winner, target, written.cold_start),
        provenance={**provenance, "host": host_fingerprint(target.device)},
        freezing=written.freezing,
    )


def _latency(judgement: Judgement, winner: Trial, target: Target, cold_start: ColdStart) -> LatencyRecord | None:
    sampling = judgement.sampling
    if sampling is None or judgement.eager_latency_ms is None or winner.latency_ms is None:
        return None
    faster = winner.speedup
    return LatencyRecord(
        point=judgement.point,
        num_threads=target.num_threads,
        eager_ms=judgement.eager_latency_ms,
        ms=winner.latency_ms,
        speedup=faster.value if faster else None,
        speedup_ci=(faster.low, faster.high) if faster else None,
        num_samples={name: len(sampling.pooled(name)) for name in sampling.samples_ms},
        num_dropped_rounds=sampling.num_dropped,
        settled=sampling.settled,
        policy=judgement.policy,
        cold_start=cold_start,
        points=winner.points,
        device=sampling.device or {},
    )
