"""The outcomes in which items end: judged, failed, or skipped before anything was built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from freezer.errors import CatalogError, ColdpressError
from pipeline.failures import retry_rank
from pipeline.planning import Item, Unplaced
from pipeline.records import SKIPPED, CandidateReport, Failure, Outcome
from pipeline.worker import BuildResult, JudgeResult


def outcome_of(item: Item, result: JudgeResult, builds: Mapping[str, BuildResult]) -> Outcome:
    """Return the outcome of a judged item."""
    judged = {report.recipe for report in result.candidates}
    candidates = (
        *result.candidates,
        *(_report(found) for recipe, found in builds.items() if recipe not in judged),
    )
    return Outcome(
        **_identity(item),
        verdict=result.verdict,
        reason=result.reason,
        recipe=result.recipe,
        failure=result.failure,
        figures=result.figures,
        clock=result.clock,
        task_metric=result.task_metric,
        build_s=sum(found.wall_s for found in builds.values()),
        judge_s=result.judge_s,
        candidates=candidates,
        pareto=result.pareto,
        host=result.host or {},
        architecture=next(
            (found.architecture for found in builds.values() if found.architecture), ""
        ),
        previous=result.previous,
        deciles_ms=result.deciles_ms,
    )


def failed_outcome(item: Item, builds: Mapping[str, BuildResult]) -> Outcome:
    """Return the outcome of an item without a candidate: failed, or kept-eager if only eager was
    requested.
    """
    if not builds:
        reason = "no recipe other than eager was requested that fits this class"
        return Outcome(**_identity(item), verdict="kept-eager", reason=reason)
    failures = {
        recipe: found.failure
        for recipe, found in builds.items()
        if found.failure and found.failure.kind != SKIPPED
    }
    messages = list(dict.fromkeys(failure.message for failure in failures.values()))
    reason = (
        messages[0]
        if len(messages) == 1
        else "; ".join(f"{name}: {found.message}" for name, found in failures.items())
    )
    # The failure that is retried soonest decides what the next campaign does: the ledger records
    # the others by themselves.
    first = min(failures.values(), key=retry_rank)
    return Outcome(
        **_identity(item),
        verdict="failed",
        reason=reason,
        failure=replace(first, message=reason),
        build_s=sum(found.wall_s for found in builds.values()),
        candidates=tuple(_report(found) for found in builds.values()),
    )


def skipped_outcomes(
    problems: Iterable[CatalogError], unplaced: Iterable[Unplaced]
) -> list[Outcome]:
    """Return the outcomes of bad entries, and of classes without a node, that --keep-going
    skips.
    """
    by_entry: dict[str, list[CatalogError]] = {}
    for problem in problems:
        by_entry.setdefault(problem.entry or "?", []).append(problem)
    return [
        *(_skipped(entry, "auto", "source", found) for entry, found in by_entry.items()),
        *(
            _skipped(item.model, item.device_class, "infrastructure", [item.problem])
            for item in unplaced
        ),
    ]


def _skipped(model: str, device_class: str, kind: str, errors: Sequence[ColdpressError]) -> Outcome:
    reason = "; ".join(map(str, errors))
    return Outcome(
        model=model,
        device_class=device_class,
        verdict="failed",
        failure=Failure(kind=kind, code=errors[0].code, message=reason),
        reason=reason,
        num_threads=0,
        source="",
        source_key="",
        judge_key="",
    )


def _identity(item: Item) -> dict[str, Any]:
    return {
        "model": item.entry.name,
        "device_class": item.device_class,
        "num_threads": item.num_threads,
        "objective": item.entry.objective,
        "source": str(item.entry.source),
        "registered_name": item.entry.registered_name,
        "tags": dict(item.entry.tags),
        "source_key": item.source.digest,
        "judge_key": item.judge.digest,
    }


def _report(result: BuildResult) -> CandidateReport:
    """Report a build that was not judged, since it or the judge failed."""
    problem, kind = (
        (result.failure.message or None, result.failure.kind) if result.failure else (None, None)
    )
    return CandidateReport(
        recipe=result.recipe,
        build_key=result.key,
        problem=problem,
        failure=kind,
        build_s=result.wall_s,
    )
