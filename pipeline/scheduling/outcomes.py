"""The outcomes in which items end: judged, failed, or skipped before anything was built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from freezer.errors import CatalogError
from pipeline.failures import retry_rank
from pipeline.planning import BETTER_CPU, Item, skipped_outcome
from pipeline.records import BuildResult, CandidateReport, JudgeFindings, Outcome
from pipeline.worker import JudgeResult
from pipeline.workspace import judged_name

Builds = Mapping[str, BuildResult]
"""By recipe."""

Decided = tuple[Item, Outcome]
"""An item and the outcome in which it ended."""


def outcome_of(
    item: Item,
    result: JudgeResult,
    builds: Builds,
) -> Outcome:
    """Return the outcome of a judged item."""
    judged = {report.recipe for report in result.candidates}
    others = [_report(build) for recipe, build in builds.items() if recipe not in judged]
    refused = [name for name, build in builds.items() if BETTER_CPU in item.builds[name].parts]
    reason = result.reason
    if refused:
        reason += (
            f"; {', '.join(refused)}: left out, since no node has {item.device_class} as its best"
            " class; the same command tries them once one joins"
        )
    architectures = [build.architecture for build in builds.values() if build.architecture]
    found = {part.name: getattr(result, part.name) for part in fields(JudgeFindings)}
    found["candidates"] = (*result.candidates, *others)
    return replace(
        _undecided(item, builds),
        **found,
        reason=reason,
        host=result.host or {},
        architecture=architectures[0] if architectures else "",
    )


def failed_outcome(item: Item, builds: Builds) -> Outcome:
    """Return the outcome of an item without a candidate: failed, or kept-eager if only eager was
    requested.
    """
    outcome = _undecided(item, builds)
    if not builds:
        return replace(
            outcome,
            verdict="kept-eager",
            reason="no recipe other than eager was requested that fits this class",
        )
    failures = {
        recipe: build.failure
        for recipe, build in builds.items()
        if build.failure and not build.is_skipped
    }
    messages = {recipe: failure.message for recipe, failure in failures.items()}
    reason = "; ".join(map(": ".join, messages.items()))
    if len(set(messages.values())) == 1:
        reason = next(iter(messages.values()))
    # The failure that is retried soonest decides what the next campaign does: the ledger records
    # the others by themselves.
    return replace(
        outcome,
        reason=reason,
        failure=replace(min(failures.values(), key=retry_rank), message=reason),
        candidates=tuple(map(_report, builds.values())),
    )


def skipped_outcomes(problems: Iterable[CatalogError]) -> list[Outcome]:
    """Return the outcomes of bad entries, which --keep-going skips."""
    by_entry = defaultdict[str, list[CatalogError]](list)
    for problem in problems:
        by_entry[problem.entry or "?"].append(problem)
    return [skipped_outcome(entry, "auto", "source", bad) for entry, bad in by_entry.items()]


def _undecided(item: Item, builds: Builds) -> Outcome:
    entry = item.entry
    return Outcome(
        model=entry.name,
        device_class=item.device_class,
        verdict="failed",
        reason=None,
        num_threads=item.num_threads,
        objective=entry.objective,
        source=str(entry.source),
        registered_name=entry.registered_name,
        tags=dict(entry.tags),
        source_key=item.source.digest,
        judge_key=item.judge.digest,
        build_s=sum(build.wall_s for build in builds.values()),
    )


def _report(build: BuildResult) -> CandidateReport:
    """Report a build that was not judged, since it or the judge failed."""
    return CandidateReport(
        recipe=build.recipe,
        build_key=build.key,
        problem=build.problem or None,
        failure=build.failure.kind if build.failure else None,
        build_s=build.wall_s,
    )


def folder_name(outcome: Outcome) -> str:
    """Return the name of the folder of the judged artifact of an outcome."""
    return judged_name(outcome.judge_key, outcome.model, outcome.missing)
