"""Assemble an artifact folder from a judged candidate: payloads, golden files, evidence,
manifest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MEDIA_JSON,
    MEDIA_PARQUET,
    MEDIA_SAFETENSORS,
    MEDIA_TEXT,
    OWN_OUTPUTS,
    Artifact,
    CandidateRecord,
    ColdStart,
    DriftRecord,
    EntrantRecord,
    FreezingRecord,
    GateRecord,
    LatencyRecord,
    Manifest,
    Needs,
    RecipeRecord,
    engines_of,
    file_ref,
    payload_at,
    payloads_for_threads,
    torch_folder,
    version_tuple,
    write_artifact,
)
from freezer.files import link_or_copy
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import (
    Judgement,
    Opening,
    Trial,
    measure,
)
from freezer.freezing.models import Subject
from freezer.freezing.packaging.evidence import (
    golden_indices,
    write_evidence,
    write_golden,
    write_texts,
)
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import Target
from freezer.hardware import cuda_needs
from freezer.runtime.devices import host_fingerprint
from freezer.runtime.tensor_files import write_own_outputs


def assemble(
    subject: Subject,
    judgement: Judgement,
    target: Target,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> Artifact:
    """Write the winner's artifact folder atomically, and before it that of the winner among those
    that need torch alone, if the winner needs an engine.

    Args:
        subject, judgement, target: see `judge`; the judgement has a winner.
        dest: a new or empty folder.
        provenance: source, weights digest, campaign.
        failures: the error message of each recipe that made no candidate; recorded.

    Raises:
        JudgeError: a fresh process cannot serve the payload.
    """
    winner = judgement.winner
    if judgement.torch_only is not None:
        assemble(
            subject,
            judgement.torch_only,
            target,
            dest=torch_folder(dest),
            provenance=provenance,
            failures=failures,
        )
    assert winner is not None, "assemble requires a winner"
    assert winner.drift is not None, "a winner has passed the drift gate"
    candidate, reference = winner.candidate, judgement.reference
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        for payload in candidate.payloads:
            link_or_copy(candidate.folder / payload.path, staging / payload.path)
        indices = golden_indices(subject, candidate)
        golden = write_golden(
            subject,
            replace(reference, calls=winner.ties or reference.calls),
            winner.drift,
            indices,
            staging,
        )
        write_own_outputs([winner.answers[index] for index in indices], staging)
        tables, texts = write_evidence(judgement, staging), write_texts(candidate, staging)
        files = [
            *((path, MEDIA_SAFETENSORS) for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS)),
            *(
                (path, MEDIA_PARQUET if path.endswith(".parquet") else MEDIA_JSON)
                for path in tables
            ),
            *((path, MEDIA_TEXT) for path in texts),
        ]
        served = payload_at(
            payloads_for_threads(candidate.payloads, target.num_threads), golden[0].point
        )
        assert served is not None, "every golden set was served"
        opening = Opening(
            folder=staging,
            payload=served,
            settings=candidate.settings,
            spec=subject.spec,
            num_threads=target.num_threads,
            device=str(target.device),
        )
        manifest = Manifest(
            model=subject.name,
            device_class=target.device_class.name,
            verdict=judgement.verdict,
            recipe=_recipe(candidate, subject),
            inputs=subject.spec,
            outputs=subject.outputs,
            structure=subject.structure,
            stateful=reference.stateful,
            payloads=candidate.payloads,
            files=tuple(file_ref(staging, path, media_type) for path, media_type in files),
            golden=golden,
            reference="float64" if reference.float64 else "eager",
            needs=Needs(
                torch=_major_minor(candidate.toolchain["torch"]),
                machine=target.device_class.archspec,
                cuda=cuda_needs(target.device_class, candidate.toolchain["cuda"]),
                packages={
                    name: _major_minor(candidate.toolchain[name])
                    for name in engines_of(candidate.payloads)
                },
            ),
            toolchain=candidate.toolchain,
            drift=DriftRecord(
                **winner.drift.summary(),
                reference_note=reference.note,
                deterministic=reference.deterministic,
                task_metric={EAGER: judgement.task_metric, candidate.recipe: winner.task_metric},
            ),
            gate=GateRecord(
                error_ratio_max=judgement.limits.error_ratio_max,
                speedup_min=judgement.limits.speedup_min,
                objective=judgement.objective,
            ),
            latency=_latency(judgement, winner, measure(opening)),
            provenance={**provenance, "host": host_fingerprint(target.device)},
            freezing=_freezing(judgement, winner, failures),
        )
        staging.chmod(0o755)
        return write_artifact(manifest, staging, dest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _major_minor(version: str) -> str:
    return ".".join(str(part) for part in version_tuple(version))


def _recipe(candidate: Candidate, subject: Subject) -> RecipeRecord:
    return RecipeRecord(
        name=candidate.recipe,
        capture=candidate.capture,
        lowering=candidate.lowering,
        settings=candidate.settings,
        tried=candidate.tried,
        preserve=candidate.preserve,
        reset=subject.reset,
    )


def _latency(
    judgement: Judgement,
    winner: Trial,
    cold_start: ColdStart,
) -> LatencyRecord:
    cell = judgement.cells[0]
    sampling, faster = cell.sampling, winner.speedup
    return LatencyRecord(
        point=cell.point,
        num_threads=cell.num_threads,
        eager_ms=judgement.eager_latency_ms or {},
        ms=winner.latency_ms or {},
        speedup=faster.value if faster else None,
        speedup_ci=(faster.low, faster.high) if faster else None,
        clock=sampling.clock,
        num_samples={name: len(sampling.pooled(name)) for name in sampling.samples_ms},
        num_dropped_rounds=sampling.num_dropped,
        settled=sampling.settled,
        policy=judgement.policy,
        cold_start=cold_start,
        points=winner.points,
        device=sampling.device or {},
    )


def _freezing(judgement: Judgement, winner: Trial, failures: Mapping[str, str]) -> FreezingRecord:
    """Reports of the winner, and results of every other recipe."""
    candidate = winner.candidate
    return FreezingRecord(
        build_s=candidate.build_s,
        size_bytes=candidate.size_bytes,
        warnings=candidate.warnings,
        entrants=tuple(EntrantRecord(**_figures(trial)) for trial in judgement.trials),
        reports=candidate.shortened_reports(),
        dropped=winner.dropped,
        strides_equal=winner.strides_equal,
        candidates=tuple(
            CandidateRecord(
                **_figures(trial),
                capture=trial.candidate.capture,
                lowering=trial.candidate.lowering,
                tried=trial.candidate.attempts,
                build_s=trial.candidate.build_s,
                size_bytes=trial.candidate.size_bytes,
                strides_equal=trial.strides_equal,
                reports=trial.candidate.shortened_reports(),
            )
            for trial in judgement.trials
            if trial is not winner
        ),
        failures=failures,
        pareto=judgement.pareto,
        previous=judgement.previous,
    )


def _figures(trial: Trial) -> dict[str, Any]:
    return {
        "recipe": trial.candidate.recipe,
        "problem": trial.problem,
        "speedup": trial.speedup.value if trial.speedup else None,
        "error_ratio": trial.drift.error_ratio if trial.drift else None,
    }
