"""The incumbent: the artifact that serves the device class now. What is slower, or drifts more for
nothing, does not replace it.

The incumbent is one more entrant in the deciding cell, beside eager and the candidates. If it was
made of the same weights, it must also pass today's drift gate; otherwise it answers differently,
and its recorded drift counts. docs/reference/contract.md states the rule.
"""

from __future__ import annotations

from dataclasses import replace

from freezer.artifact import (
    Payload,
    PreviousRecord,
    SpeedChange,
    payload_at,
    payloads_for_threads,
    regression_kind,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging.cold_start import with_memory
from freezer.freezing.judging.judgement import (
    PREVIOUS,
    Incumbent,
    Judgement,
    Trial,
    Verdict,
    percentiles_of,
)
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.trials import run_trial
from freezer.freezing.judging.verdicts import ALIKE, over_limit
from freezer.freezing.recipes import EAGER
from freezer.spec import MARKS, timing_of

LEAST_LOSS = 1.05
"""How many times as fast the incumbent must be, by the bound of the interval, to stay in place of a
model with other weights.
"""


def enter_incumbent(session: Session, judgement: Judgement) -> Judgement:
    """Prepare the incumbent to be timed beside the candidates.

    It does not compete if a candidate has its payload, byte for byte.
    """
    incumbent = judgement.incumbent
    if incumbent is None or not judgement.passing:
        return judgement
    problem = incumbent.problem or _incomparable(session, incumbent)
    record = _record(
        session,
        incumbent,
        problem=problem,
    )
    if problem:
        return replace(judgement, previous=record)
    payloads = payloads_for_threads(incumbent.manifest.payloads, session.num_threads)
    deciding = payload_at(payloads, session.subject.points[0])
    assert deciding is not None, "an artifact serves all sizes"
    for trial in judgement.trials:
        if deciding.digest in [payload.digest for payload in trial.candidate.payloads]:
            return replace(judgement, incumbent=None)
    old = Trial(candidate=_as_candidate(incumbent, payloads))
    if record.same_weights:
        old = run_trial(session, old.candidate)
        if old.problem is not None:
            problem = f"it does not pass today's drift gate: {old.problem}"
            return replace(judgement, previous=replace(record, problem=problem))
        record = replace(record, error_ratio=old.measured.drift.error_ratio)
    if session.limits.memory_mb_max is not None:
        old = with_memory(session, old)
    if old.problem is not None:
        return replace(judgement, previous=replace(record, problem=old.problem))
    return replace(
        judgement,
        previous=record,
        old=old,
    )


def _record(session: Session, incumbent: Incumbent, *, problem: str | None) -> PreviousRecord:
    manifest = incumbent.manifest
    return PreviousRecord(
        version=manifest.version,
        artifact=incumbent.digest,
        recipe=manifest.recipe.name,
        torch=str(manifest.toolchain.get("torch", "")),
        same_weights=manifest.provenance.get("weights") == session.subject.weights,
        error_ratio=manifest.drift.error_ratio,
        problem=problem,
    )


def _incomparable(session: Session, incumbent: Incumbent) -> str | None:
    """Why an artifact cannot be an entrant; None if it can."""
    manifest, subject = incumbent.manifest, session.subject
    recipe = manifest.recipe
    interface = (manifest.inputs, manifest.outputs, manifest.structure)
    if interface != (subject.spec, subject.outputs, subject.structure):
        return "its inputs or outputs differ"
    if set(recipe.preserve) != set(subject.kept_names) or recipe.reset != subject.reset:
        return "it preserves other names"
    if manifest.verdict != "published":
        return "it is not frozen"
    if not payloads_for_threads(manifest.payloads, session.num_threads):
        return f"it has no payload for {session.num_threads} threads"
    return None


def _as_candidate(incumbent: Incumbent, payloads: tuple[Payload, ...]) -> Candidate:
    manifest = incumbent.manifest
    return Candidate(
        folder=incumbent.folder,
        recipe=PREVIOUS,
        lowering=manifest.recipe.lowering,
        capture=manifest.recipe.capture,
        settings=manifest.recipe.settings,
        tried=(),
        payloads=payloads,
        reports={},
        warnings=(),
        toolchain=manifest.toolchain,
        weights=str(manifest.provenance.get("weights")),
        build_s=0.0,
        preserve=manifest.recipe.preserve,
    )


def compare_with_incumbent(session: Session, judgement: Judgement) -> Judgement:
    """Keep the incumbent if what would be published, or eager, is worse.

    For `kept-eager`, eager stands for the captured program that would serve.
    """
    record, old = judgement.previous, judgement.old
    if record is None or judgement.verdict not in ("published", "kept-eager"):
        return judgement
    if old is None:
        reason = f"{judgement.reason}; not compared with {record}: {record.problem}"
        return replace(judgement, reason=reason)
    new = judgement.winner
    old, record = _timed(
        session,
        judgement,
        old,
        record,
    )
    assert record.speedup_ci is not None
    low, high = record.speedup_ci
    subject = "" if new else "eager is "
    times = f"{MARKS[judgement.cells[0].sampling.clock]}{record.speedup:.2f} times"
    compared = f"{subject}{times} ({low:.2f}-{high:.2f}) as fast as {record}"
    verdict, addition = _settled(
        session,
        judgement.verdict,
        new,
        old,
        record,
    )
    return replace(
        judgement,
        verdict=verdict,
        reason=f"{judgement.reason}; {compared}{addition}",
        winner=new if verdict == "published" else None,
        previous=record,
    )


def _timed(
    session: Session, judgement: Judgement, old: Trial, record: PreviousRecord
) -> tuple[Trial, PreviousRecord]:
    """The trial of the incumbent with its latency, and the record with the speed of what would
    replace it.
    """
    cell, policy, new = judgement.cells[0], session.policy, judgement.winner
    timing = timing_of(session.objective)
    faster = cell.faster(
        new.recipe if new else EAGER,
        PREVIOUS,
        1,
        policy,
        timing,
    )
    assert faster is not None, "the timing was undisturbed"
    old = replace(
        old,
        latency_ms=percentiles_of(cell.sampling, PREVIOUS, policy),
        speedup=cell.faster(PREVIOUS, EAGER, 1, policy, timing),
    )
    return old, replace(
        record,
        speedup=faster.value,
        speedup_ci=(faster.low, faster.high),
        p50_ms=old.latency_ms.p50,
    )


def _settled(
    session: Session, verdict: Verdict, new: Trial | None, old: Trial, record: PreviousRecord
) -> tuple[Verdict, str]:
    """The verdict after a comparison, and the end of its sentence."""
    worse = _worse(
        session,
        new,
        old,
        record,
    )
    if worse is None:
        return verdict, ""
    if problem := over_limit(session, old):
        return verdict, f"{worse}; that no longer qualifies: {problem}"
    if session.limits.allow_regression:
        return verdict, f"{worse}; allowed by --allow-regression"
    return "kept-previous", f"{worse}; --allow-regression replaces it"


def _worse(session: Session, new: Trial | None, old: Trial, record: PreviousRecord) -> str | None:
    """How the new artifact is worse, in words that follow its speed; None if it is not."""
    if new and session.objective == "size":
        size, before = new.candidate.size_bytes, old.candidate.size_bytes
        if size > ALIKE * before:
            return f", with {size / 1e6:.1f} MB instead of {before / 1e6:.1f}"
        if before > ALIKE * size:
            return None
    assert record.speedup is not None
    assert record.speedup_ci is not None
    low, high = record.speedup_ci
    speed = SpeedChange(
        value=record.speedup,
        low=low,
        high=high,
        least_loss=1.0 if record.same_weights else LEAST_LOSS,
    )
    error_ratio = new.measured.drift.error_ratio if new else None
    worse = regression_kind(
        speed,
        record.error_ratio,
        error_ratio,
    )
    if worse == "drifted":
        return f", and its error ratio is {error_ratio:.2f} instead of {record.error_ratio:.2f}"
    return worse and ""
