"""The outcome of an item: made of what its judge found, or of builds that all failed, before it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.failures.policy import retry_rank
from pipeline.planning.item import Item
from pipeline.records.outcome import CandidateReport, Outcome
from pipeline.worker.requests import BuildResult, JudgeResult


def outcome_of(item: Item, result: JudgeResult, builds: Mapping[str, BuildResult]) -> Outcome:
    """The outcome that a judge's result makes, before it is published."""
    judged = {report.recipe for report in result.candidates}
    candidates = (*result.candidates, *(_report(found) for recipe, found in builds.items() if recipe not in judged))
    return Outcome(
        **_identity(item),
        verdict=result.verdict,
        reason=result.reason,
        recipe=result.recipe,
        failure=result.failure,
        figures=result.figures,
        task_metric=result.task_metric,
        build_s=sum(found.wall_s for found in builds.values()),
        judge_s=result.judge_s,
        candidates=candidates,
        host=result.host or {},
    )


def failed_outcome(item: Item, builds: Mapping[str, BuildResult]) -> Outcome:
    """The outcome of an item of which nothing was built: failed, or kept-eager where nothing but eager was asked for."""
    if not builds:
        reason = "no other recipe than eager was asked for that fits this class"
        return Outcome(**_identity(item), verdict="kept-eager", reason=reason)
    failures = {recipe: found.failure for recipe, found in builds.items() if found.failure is not None}
    recipes: dict[str, list[str]] = {}
    for recipe, failure in failures.items():
        recipes.setdefault(failure.message, []).append(recipe)
    reason = "; ".join(
        message if len(names) == len(builds) else f"{', '.join(names)}: {message}" for message, names in recipes.items()
    )
    # The failure that is retried soonest decides what the next campaign does: the ledger records the others by themselves.
    first = min(failures.values(), key=retry_rank)
    return Outcome(
        **_identity(item),
        verdict="failed",
        reason=reason,
        failure=replace(first, message=reason),
        build_s=sum(found.wall_s for found in builds.values()),
        candidates=tuple(_report(found) for found in builds.values()),
    )


def _identity(item: Item) -> dict[str, Any]:
    return {
        "model": item.entry.name,
        "device_class": item.device_class,
        "num_threads": item.num_threads,
        "source": str(item.entry.source),
        "registered_name": item.entry.registered_name,
        "tags": dict(item.entry.tags),
        "source_key": item.source.digest,
        "judge_key": item.judge.digest,
    }


def _report(result: BuildResult) -> CandidateReport:
    """Of a build that was not judged: it failed, or the judge did."""
    problem, kind = (result.failure.message or None, result.failure.kind) if result.failure else (None, None)
    return CandidateReport(recipe=result.recipe, build_key=result.key, problem=problem, failure=kind, build_s=result.wall_s)
