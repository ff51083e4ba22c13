"""The incumbent: the artifact that serves the device class now. With the same weights, what is
slower, or drifts more for nothing, does not replace it.

The incumbent is one more entrant in the deciding cell, beside eager and the candidates. If it was
made of the same weights, it must also pass today's drift gate; with other weights it is another
model, and only compared. docs/reference/contract.md states the rule.
"""

from __future__ import annotations

from dataclasses import replace

from freezer.artifact import (
    Manifest,
    Payload,
    PreviousRecord,
    payloads_for_threads,
    regression_kind,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.in_hand import PREVIOUS
from freezer.freezing.judging.cold_start import with_memory
from freezer.freezing.judging.judgement import Incumbent, Judgement, Trial
from freezer.freezing.judging.session import Session
from freezer.freezing.judging.timed_cells import deciding_alone
from freezer.freezing.judging.trials import run_trial
from freezer.freezing.judging.verdicts import ALIKE, over_limit
from freezer.freezing.recipes import EAGER
from freezer.spec import FLOAT32, timing_of
from freezer.timing import Speedup


def enter_incumbent(session: Session, judgement: Judgement) -> Judgement:
    """Prepare the incumbent to be timed beside the candidates.

    It does not compete if a candidate has its payload, byte for byte.
    """
    incumbent = judgement.incumbent
    if incumbent is None or not judgement.passing:
        return judgement
    manifest = incumbent.manifest
    record = PreviousRecord(
        version=manifest.version,
        artifact=incumbent.digest,
        recipe=manifest.recipe.name,
        torch=str(manifest.toolchain.get("torch", "")),
        same_weights=manifest.provenance.get("weights") == session.subject.weights,
        error_ratio=manifest.drift.error_ratio,
        problem=incumbent.problem or _incomparable(session, manifest),
    )
    if record.problem:
        return replace(judgement, previous=record)
    payloads = payloads_for_threads(manifest.payloads, session.num_threads)
    old = Trial(candidate=_as_candidate(incumbent, payloads))
    [deciding] = deciding_alone(session, old.candidate).payloads
    for trial in judgement.trials:
        if deciding.digest in [payload.digest for payload in trial.candidate.payloads]:
            return judgement
    if record.same_weights:
        old = run_trial(session, old.candidate)
        if old.problem is None:
            record = replace(record, error_ratio=old.measured.drift.error_ratio)
        else:
            old = replace(old, problem=f"it does not pass today's drift gate: {old.problem}")
    if old.problem is None and session.limits.memory_mb_max is not None:
        old = with_memory(session, old)
    if old.problem is not None:
        return replace(judgement, previous=replace(record, problem=old.problem))
    return replace(judgement, previous=record, old=old)


def _incomparable(session: Session, manifest: Manifest) -> str | None:
    """Why an artifact cannot be an entrant; None if it can."""
    subject, recipe = session.subject, manifest.recipe
    interface = (manifest.inputs, manifest.outputs, manifest.structure)
    if interface != (subject.spec, subject.outputs, subject.structure):
        return "its inputs or outputs differ"
    if set(recipe.preserve) != set(subject.kept_names) or recipe.reset != subject.reset:
        return "it preserves other names"
    if manifest.verdict == "kept-eager":
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
        payloads=payloads,
        toolchain=manifest.toolchain,
        weights=str(manifest.provenance.get("weights")),
        preserve=manifest.recipe.preserve,
        precision=manifest.recipe.precision,
    )


def compare_with_incumbent(session: Session, judgement: Judgement) -> Judgement:
    """Keep the incumbent if what would be published, or eager, is worse.

    For `kept-eager`, eager stands for the captured program that would serve.
    """
    record, old, new = judgement.previous, judgement.old, judgement.winner
    verdict, policy, timing = judgement.verdict, session.policy, timing_of(session.objective)
    if record is None or verdict not in ("published", "kept-eager"):
        return judgement
    if old is None:
        reason = f"{judgement.reason}; not compared with {record}: {record.problem}"
        return replace(judgement, reason=reason)
    faster = judgement.cells[0].faster(new.recipe if new else EAGER, PREVIOUS, 1, policy, timing)
    assert faster is not None, "the timing was undisturbed"
    subject = "" if new else "eager is "
    compared = f"{subject}{faster} times ({faster.low:.2f}-{faster.high:.2f}) as fast as {record}"
    worse = _worse(session, new, old, record, faster)
    if worse is not None:
        compared += worse
        if not record.same_weights:
            compared += "; replaced, since its weights differ"
        elif problem := over_limit(session, old):
            compared += f"; that no longer qualifies: {problem}"
        elif session.limits.allow_regression:
            compared += "; allowed by --allow-regression"
        else:
            compared += "; --allow-regression replaces it"
            verdict = "kept-previous"
    return replace(
        judgement,
        verdict=verdict,
        reason=f"{judgement.reason}; {compared}",
        winner=new if verdict == "published" else None,
        previous=replace(
            record,
            speedup=faster.value,
            speedup_ci=(faster.low, faster.high),
            p50_ms=old.latency_ms.p50,
        ),
    )


def _worse(
    session: Session,
    new: Trial | None,
    old: Trial,
    record: PreviousRecord,
    faster: Speedup,
) -> str | None:
    """How the new artifact is worse, in words that follow its speed; None if it is not."""
    if new and session.objective == "size":
        size, before = new.candidate.size_bytes, old.candidate.size_bytes
        if size > ALIKE * before:
            return f", with {size / 1e6:.1f} MB instead of {before / 1e6:.1f}"
        if before > ALIKE * size:
            return None
    error_ratio = new.measured.drift.error_ratio if new else None
    ratio_before = record.error_ratio if old.candidate.precision == FLOAT32 else None
    worse = regression_kind(faster, ratio_before, error_ratio)
    if worse == "drifted" and new and new.candidate.precision != FLOAT32:
        return f", and it computes in {new.candidate.precision} instead of {FLOAT32}"
    if worse == "drifted":
        return f", and its error ratio is {error_ratio:.2f} instead of {record.error_ratio:.2f}"
    return worse and ""
