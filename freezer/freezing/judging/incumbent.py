"""The incumbent: the artifact that serves the device class now. What is slower, or drifts more for
nothing, does not replace it.

The incumbent is one more entrant in the deciding cell, beside eager and the candidates. If it was
made of the same weights, it must also pass today's drift gate; otherwise it answers differently,
and its recorded drift counts. docs/contract.md states the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from freezer.artifact import (
    Manifest,
    Payload,
    PreviousRecord,
    SpeedChange,
    payload_at,
    payloads_for_threads,
    regression,
)
from freezer.freezing.candidates import Candidate
from freezer.freezing.drift import Gate, Reference
from freezer.freezing.judging.footprints import with_footprints
from freezer.freezing.judging.timed_cells import PREVIOUS, Cell
from freezer.freezing.judging.trials import Trial, run_trial
from freezer.freezing.judging.verdicts import ALIKE, Verdict, over_limit
from freezer.freezing.models import Subject
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import Target
from freezer.spec import Limits, Objective, SamplingPolicy, timing_of
from freezer.timing import Speedup

LEAST_LOSS = 1.05
"""How many times as fast the incumbent must be, by the bound of the interval, to stay in place of a
model with other weights.
"""


@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """The artifact that serves the device class now.

    Attributes:
        folder, manifest: of the artifact.
        digest: of its image manifest in the store.
        problem: why it does not serve this process; None if it does.
    """

    folder: Path
    manifest: Manifest
    digest: str
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rival:
    """An incumbent in a judgement.

    Attributes:
        trial: with its payloads for the deciding thread count; None if it cannot be compared, and
            `record.problem` says why.
        entrant: with the payload that serves in the deciding cell alone.
    """

    record: PreviousRecord
    trial: Trial | None = None
    entrant: Candidate | None = None


def enter(
    incumbent: Incumbent,
    subject: Subject,
    candidates: Sequence[Candidate],
    target: Target,
    reference: Reference,
    limits: Limits,
) -> Rival | None:
    """Prepare the incumbent for the comparison with the candidates.

    Args:
        incumbent: the artifact that serves now.
        subject, candidates, target, reference, limits: of the judgement.

    Returns:
        None if a candidate has the incumbent's payload, byte for byte: it competes already.
    """
    manifest = incumbent.manifest
    record = PreviousRecord(
        version=manifest.version,
        artifact=incumbent.digest,
        recipe=manifest.recipe.name,
        torch=str(manifest.toolchain.get("torch", "")),
        same_weights=manifest.provenance.get("weights") == candidates[0].weights,
        error_ratio=manifest.drift.error_ratio,
    )
    if problem := incumbent.problem or _incomparable(manifest, subject, target):
        return Rival(record=replace(record, problem=problem))
    held = payloads_for_threads(manifest.payloads, target.num_threads)
    deciding = payload_at(held, subject.points[0])
    assert deciding is not None, "an artifact serves all sizes"
    if deciding.digest in {
        payload.digest for candidate in candidates for payload in candidate.payloads
    }:
        return None
    trial = Trial(candidate=_as_candidate(incumbent, held), drift=None, problem=None)
    if record.same_weights:
        gate = Gate(error_ratio_max=limits.error_ratio_max, float64=reference.float64)
        trial = run_trial(subject, trial.candidate, target, reference, gate)
        if trial.problem is not None:
            return Rival(
                record=replace(
                    record, problem=f"it does not pass today's drift gate: {trial.problem}"
                )
            )
        record = replace(record, error_ratio=trial.drift.error_ratio if trial.drift else None)
    (trial,) = with_footprints([trial], subject, target, limits)
    if trial.problem is not None:
        return Rival(record=replace(record, problem=trial.problem))
    return Rival(record=record, trial=trial, entrant=replace(trial.candidate, payloads=(deciding,)))


def _incomparable(manifest: Manifest, subject: Subject, target: Target) -> str | None:
    """Why an artifact cannot be an entrant; None if it can."""
    interface = (manifest.inputs, manifest.outputs, manifest.structure)
    if interface != (subject.spec, subject.outputs, subject.structure):
        return "its inputs or outputs differ"
    if (
        set(manifest.recipe.preserve) != set(subject.kept_names)
        or manifest.recipe.reset != subject.reset
    ):
        return "it preserves other names"
    if manifest.verdict != "published":
        return "it is not frozen"
    if not payloads_for_threads(manifest.payloads, target.num_threads):
        return f"it has no payload for {target.num_threads} threads"
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


def settle(
    rival: Rival,
    decision: tuple[Verdict, str, Trial],
    cell: Cell,
    limits: Limits,
    policy: SamplingPolicy,
    objective: Objective,
) -> tuple[Verdict, str, PreviousRecord]:
    """Compare what would replace the incumbent with it.

    Args:
        rival: of the judgement.
        decision: of `decide`. For `kept-eager`, eager stands for the captured program that would
            serve.
        cell: the deciding cell.
        limits, policy, objective: of the judgement.

    Returns:
        The verdict and its reason after the comparison, and the record of it.
    """
    verdict, reason, best = decision
    record, old = rival.record, rival.trial
    if verdict not in ("published", "kept-eager"):
        return verdict, reason, record
    if old is None:
        return verdict, f"{reason}; not compared with {record}: {record.problem}", record
    new = best if verdict == "published" else None
    timing, name = timing_of(objective), new.candidate.recipe if new else EAGER
    faster, over_eager = (
        cell.faster(*names, 1, policy, timing) for names in ((name, PREVIOUS), (PREVIOUS, EAGER))
    )
    assert faster is not None, "the timing was undisturbed"
    assert over_eager is not None
    latency_ms = cell.sampling.percentiles(PREVIOUS, policy)
    record = replace(
        record,
        speedup=faster.value,
        speedup_ci=(faster.low, faster.high),
        p50_ms=latency_ms.get("p50"),
    )
    of_eager = "" if new else "eager is "
    reason = (
        f"{reason}; {of_eager}{faster.value:.2f} times ({faster.low:.2f}-{faster.high:.2f}) as fast"
        f" as {record}"
    )
    worse = _worse(faster, new.drift.error_ratio if new and new.drift else None, record)
    if new and objective == "size":
        size, before = new.candidate.size_bytes, old.candidate.size_bytes
        if size > ALIKE * before:
            worse = f", with {size / 1e6:.1f} MB instead of {before / 1e6:.1f}"
        elif before > ALIKE * size:
            worse = None
    if worse is None:
        return verdict, reason, record
    if problem := over_limit(replace(old, latency_ms=latency_ms), over_eager, limits, objective):
        return verdict, f"{reason}{worse}; that no longer qualifies: {problem}", record
    if limits.allow_regression:
        return verdict, f"{reason}{worse}; allowed by --allow-regression", record
    return "kept-previous", f"{reason}{worse}; --allow-regression replaces it", record


def _worse(faster: Speedup, error_ratio: float | None, record: PreviousRecord) -> str | None:
    """How a new artifact is worse, as the end of a sentence with its speed; None if it is not."""
    speed = SpeedChange(
        value=faster.value,
        low=faster.low,
        high=faster.high,
        least_loss=1.0 if record.same_weights else LEAST_LOSS,
    )
    worse = regression(speed, record.error_ratio, error_ratio)
    if worse == "drifted":
        return f", and its error ratio is {error_ratio:.2f} instead of {record.error_ratio:.2f}"
    return worse and ""
