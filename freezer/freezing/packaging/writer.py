"""Assemble an artifact folder from a judged candidate: payloads, golden files, evidence,
manifest. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MEDIA_JSON,
    MEDIA_PARQUET,
    MEDIA_SAFETENSORS,
    MEDIA_TEXT,
    Artifact,
    CandidateRecord,
    DriftRecord,
    EntrantRecord,
    FileRef,
    FreezingRecord,
    GateRecord,
    GoldenSet,
    LatencyRecord,
    Manifest,
    Needs,
    RecipeRecord,
    engines_of,
    file_ref,
    files_of,
    torch_folder,
    version_tuple,
    write_artifact,
)
from freezer.files import link_or_copy, make_folder, scratch_folder
from freezer.freezing.candidates import EVIDENCE, Candidate, architecture_digest
from freezer.freezing.judging import Judgement, Session, Trial
from freezer.freezing.packaging.evidence import (
    golden_indices,
    write_eager,
    write_golden,
    write_tables,
    write_texts,
)
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import Target
from freezer.hardware import cuda_needs
from freezer.runtime.devices import host_fingerprint

_MEDIA = {
    ".safetensors": MEDIA_SAFETENSORS,
    ".parquet": MEDIA_PARQUET,
    ".json": MEDIA_JSON,
    ".txt": MEDIA_TEXT,
}


def assemble(
    session: Session,
    judgement: Judgement,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> Artifact:
    """Write the winner's artifact folder atomically, and before it that of the best one for torch
    alone, if the winner needs an engine.

    Args:
        session: the session of the judgement.
        judgement: a judgement with a winner.
        dest: a new or empty folder.
        provenance: source and campaign of the model; digests of weights and architecture are added.
        failures: the error message of each recipe that made no candidate; recorded.
    """
    if judgement.torch_only is not None:
        beside = torch_folder(dest)
        assemble(
            session, judgement.torch_only, dest=beside, provenance=provenance, failures=failures
        )
    winner = judgement.winner
    assert winner is not None, "assemble requires a winner"
    make_folder(dest.parent)
    with scratch_folder(place=dest.parent) as scratch:
        staging = scratch / "artifact"
        staging.mkdir()
        golden, files = _write_files(session, judgement, winner, staging)
        origin = {"weights": session.subject.weights, "host": host_fingerprint()}
        origin["architecture"] = architecture_digest(session.subject, session.target)
        manifest = replace(
            _manifest(session, judgement, winner),
            files=files,
            golden=golden,
            provenance={**provenance, **origin},
            freezing=_freezing(judgement, winner, failures),
        )
        return write_artifact(manifest, staging, dest)


def _write_files(
    session: Session,
    judgement: Judgement,
    winner: Trial,
    folder: Path,
) -> tuple[tuple[GoldenSet, ...], tuple[FileRef, ...]]:
    """Write payloads, golden files and evidence; return the golden sets, and all files but the
    payloads.
    """
    candidate = winner.candidate
    for file in files_of(candidate.payloads):
        link_or_copy(candidate.folder / file.path, folder / file.path)
    golden = write_golden(session, winner, golden_indices(session.subject, candidate), folder)
    write_texts(candidate.folder, folder / EVIDENCE)
    write_tables(judgement, folder / EVIDENCE)
    paths = [GOLDEN_INPUTS, GOLDEN_OUTPUTS]
    if winner.accuracy is not None:
        paths += write_eager(session, folder)
    paths += sorted(f"{EVIDENCE}/{path.name}" for path in (folder / EVIDENCE).iterdir())
    return golden, tuple(file_ref(folder, path, _MEDIA[Path(path).suffix]) for path in paths)


def _manifest(session: Session, judgement: Judgement, winner: Trial) -> Manifest:
    """The manifest without files and records of the freeze."""
    subject, reference, candidate = session.subject, session.reference, winner.candidate
    return Manifest(
        model=subject.name,
        device_class=session.target.device_class.name,
        verdict=judgement.verdict,
        recipe=_recipe(candidate, subject.reset),
        inputs=subject.spec,
        outputs=subject.outputs,
        structure=subject.structure,
        stateful=reference.stateful,
        payloads=candidate.payloads,
        files=(),
        golden=(),
        reference="float64" if reference.float64 else "eager",
        needs=_needs(candidate, session.target),
        toolchain=candidate.toolchain,
        drift=DriftRecord(
            **asdict(winner.drift.measured),
            reference_note=reference.note,
            deterministic=reference.deterministic,
            task_metric={EAGER: judgement.task_metric, candidate.recipe: winner.task_metric},
        ),
        gate=GateRecord(
            error_ratio_max=session.limits.error_ratio_max,
            speedup_min=session.limits.speedup_min,
            objective=session.objective,
        ),
        latency=_latency(session, judgement, winner),
        accuracy=winner.accuracy,
        provenance={},
    )


def _recipe(candidate: Candidate, reset: str | None) -> RecipeRecord:
    return RecipeRecord(
        name=candidate.recipe,
        capture=candidate.capture,
        lowering=candidate.lowering,
        settings=candidate.settings,
        tried=candidate.tried,
        preserve=candidate.preserve,
        reset=reset,
        precision=candidate.precision,
    )


def _needs(candidate: Candidate, target: Target) -> Needs:
    toolchain = candidate.toolchain
    engines = engines_of(candidate.payloads)
    return Needs(
        torch=_major_minor(toolchain["torch"]),
        machine=target.device_class.archspec,
        cuda=cuda_needs(target.device_class, toolchain["cuda"]),
        packages={name: _major_minor(toolchain[name]) for name in engines},
    )


def _major_minor(version: str) -> str:
    return ".".join(map(str, version_tuple(version)))


def _latency(session: Session, judgement: Judgement, winner: Trial) -> LatencyRecord | None:
    if judgement.inherited is not None:
        earlier = judgement.inherited
        return replace(earlier, cold_start=winner.cold_start or earlier.cold_start)
    if not judgement.cells:
        return None
    cell, measured = judgement.cells[0], winner.measured
    sampling = cell.sampling
    return LatencyRecord(
        point=cell.point,
        num_threads=cell.num_threads,
        eager_ms=judgement.eager_ms,
        ms=sampling.percentiles(winner.recipe, session.policy),
        speedup=measured.speedup,
        speedup_ci=measured.speedup_ci,
        clock=sampling.clock,
        num_samples={name: len(sampling.pooled(name)) for name in sampling.samples_ms},
        num_dropped_rounds=sampling.num_dropped,
        settled=sampling.settled,
        policy=session.policy,
        cold_start=winner.cold_start,
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
        entrants=tuple(map(_entrant, judgement.trials)),
        reports=candidate.shortened_reports(),
        dropped=winner.dropped,
        strides_equal=winner.strides_equal,
        candidates=tuple(_loser(trial) for trial in judgement.trials if trial is not winner),
        failures=failures,
        pareto=judgement.pareto,
        previous=judgement.previous,
    )


def _entrant(trial: Trial) -> EntrantRecord:
    measured = trial.measured
    return EntrantRecord(
        recipe=trial.recipe,
        problem=trial.problem,
        speedup=measured.speedup,
        error_ratio=measured.drift.error_ratio,
    )


def _loser(trial: Trial) -> CandidateRecord:
    candidate = trial.candidate
    return CandidateRecord(
        **asdict(_entrant(trial)),
        capture=candidate.capture,
        lowering=candidate.lowering,
        tried=candidate.tried,
        build_s=candidate.build_s,
        size_bytes=candidate.size_bytes,
        strides_equal=trial.strides_equal,
        reports=candidate.shortened_reports(),
    )
