"""The life of an item as a state machine, without Ray, I/O or a clock; and the outcome in which it ends.

    planned -> building -> built -> judging -> decided

Each method of `ItemState` takes an event, changes the state, and returns the actions to perform in order. A failed judge is queued
again, or its builds if a candidate was damaged. The retry table is pipeline/failures/policy.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freezer.errors import CatalogError, ColdpressError
from pipeline.failures.policy import attempts_left, decide, final_sentence, retry_rank
from pipeline.planning.memory_estimate import Demand, corrected, learned
from pipeline.planning.plan import Item, Unplaced
from pipeline.records.outcome import CandidateReport, Failure, Outcome
from pipeline.worker.requests import BuildResult, JudgeResult

NO_DEMAND = Demand(asked=0, least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The failed attempts of one build or judge, and where the next one may run.

    Attributes:
        failures: kinds of the failures in this campaign, as in pipeline/failures/policy.py.
        avoid: ids of nodes to use only if no other node serves the class.
        memory_bytes: memory to reserve; None for the estimate of the item.
    """

    failures: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFailure:
    """Why an attempt failed, reported by Ray or by the task itself.

    Attributes:
        kind: key of the retry table.
        failure: of the outcome, if it is final.
        node_id: where it ran, if known.
        peak_bytes: as in `pipeline.worker.child.End`.
    """

    kind: str
    failure: Failure
    node_id: str | None = None
    peak_bytes: int = 0


# Actions


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTask:
    """Queue a build, or the judge if `recipe` is None; `first` puts it before the other tasks of its class."""

    recipe: str | None
    first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordBuild:
    """Record the final result of a build."""

    result: BuildResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowNote:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decide:
    """Hand the outcome over for publication."""

    outcome: Outcome


ItemAction = QueueTask | RecordBuild | ShowNote | Decide


@dataclass(kw_only=True, eq=False)
class ItemState:
    """The current state of one item.

    Attributes:
        index: position in the plan.
        estimate: of its memory; at least the peak of its finished builds.
        results: final results of builds, by recipe.
        attempts: failed attempts, by recipe; None is the judge.
        num_damages: how often a judge found a candidate damaged.
        outcome: once decided.
    """

    item: Item
    index: int = 0
    estimate: Demand = NO_DEMAND
    results: dict[str, BuildResult] = field(default_factory=dict)
    attempts: dict[str | None, Attempts] = field(default_factory=dict)
    num_damages: int = 0
    outcome: Outcome | None = None

    def attempts_of(self, recipe: str | None) -> Attempts:
        """The failed attempts of a build, or of the judge."""
        return self.attempts.get(recipe, Attempts())

    def demand_of(self, recipe: str | None) -> Demand:
        """The memory that the next attempt of a build or judge needs."""
        memory_bytes = self.attempts_of(recipe).memory_bytes
        return self.estimate if memory_bytes is None else corrected(self.estimate, memory_bytes)

    def start(self, finished: Mapping[str, BuildResult]) -> list[ItemAction]:
        """Start with the builds that earlier campaigns finished, by recipe."""
        self.results = dict(finished)
        queued = [QueueTask(recipe=recipe) for recipe in self.item.builds if recipe not in finished]
        return [*queued, *self._after_builds()]

    def build_ended(self, result: BuildResult, failed: TaskFailure | None = None) -> list[ItemAction]:
        """Take the end of a build. `failed` is set if the retry table applies; a build that never started has only a result."""
        if failed is not None:
            retried = self._retry(result.recipe, failed)
            if retried:
                return retried
            result = replace(result, failure=self._final(result.recipe, failed))
        self.results[result.recipe] = result
        self.estimate = learned(self.estimate, result.peak_bytes)
        return [RecordBuild(result=result), *self._after_builds()]

    def judge_ended(self, result: JudgeResult, failed: TaskFailure | None = None, gone: tuple[str, ...] = ()) -> list[ItemAction]:
        """Take the end of the judge; `failed` as for a build. `gone` lists recipes whose candidate was damaged and removed."""
        item = self.item
        if failed is not None:
            rebuild = decide(failed.kind, failed.failure.code).rebuild
            again = self._rebuild(failed, gone) if rebuild else self._retry(None, failed)
            if again:
                return again
            final = self._final(None, failed)
            result = replace(result, reason=final.message, failure=final)
        outcome = outcome_of(item, result, self.results)
        if item.before is not None and outcome.verdict in ("failed", "unstable"):
            text = f"{item.label()}: re-validation failed ({outcome.coded_reason}); keeping the previous result"
            return [ShowNote(text=text), *self.decided(item.before)]
        return self.decided(outcome)

    def decided(self, outcome: Outcome) -> list[ItemAction]:
        """Take the outcome: the judge's, or one of an earlier campaign or of one that runs at the same time."""
        self.outcome = outcome
        return [Decide(outcome=outcome)]

    def _after_builds(self) -> list[ItemAction]:
        """Queue the judge if all builds ended and one succeeded; decide if there is nothing to judge."""
        item, results = self.item, self.results
        if len(results) < len(item.builds):
            return []
        if item.before is not None and all(results[recipe].failure is not None for recipe in item.missed):
            return self.decided(item.before)
        if any(result.failure is None for result in results.values()):
            return [QueueTask(recipe=None)]
        return self.decided(failed_outcome(item, results))

    def _rebuild(self, failed: TaskFailure, gone: tuple[str, ...]) -> list[ItemAction]:
        """Build removed candidates again, with all attempts, if the policy allows it."""
        self.num_damages += 1
        if not gone or not attempts_left([failed.kind] * self.num_damages, failed.kind, failed.failure.code):
            return []
        for recipe in gone:
            del self.results[recipe]
        for task in (None, *gone):
            self.attempts.pop(task, None)
        text = f"{self.item.label()}: {failed.failure.message}; building {', '.join(gone)} again"
        return [ShowNote(text=text), *(QueueTask(recipe=recipe) for recipe in gone)]

    def _retry(self, recipe: str | None, failed: TaskFailure) -> list[ItemAction]:
        """Queue a failed build or judge for another attempt, if the policy allows one."""
        before = self.attempts_of(recipe)
        failures = (*before.failures, failed.kind)
        left = attempts_left(failures, failed.kind, failed.failure.code)
        if not left:
            return []
        decision, how = decide(failed.kind, failed.failure.code), ""
        avoid, memory_bytes = before.avoid, before.memory_bytes
        if decision.elsewhere and failed.node_id is not None:
            avoid, how = avoid | {failed.node_id}, ", on another node if there is one"
        if decision.more_memory:
            used_bytes = max(failed.peak_bytes, failed.failure.tried_bytes or 0)  # 0 if Ray killed the worker
            memory_bytes = 2 * max(self.demand_of(recipe).asked, used_bytes)
            how = f", with {memory_bytes / 1e9:.1f} GB kept free"
        self.attempts[recipe] = Attempts(failures=failures, avoid=avoid, memory_bytes=memory_bytes)
        number = len(failures) + 1
        what = f"{self.item.label(recipe)}: {failed.failure.kind}: {failed.failure.message}"
        return [
            ShowNote(text=f"{what}; attempt {number} of {number - 1 + left}{how}"),
            QueueTask(recipe=recipe, first=not decision.later),
        ]

    def _final(self, recipe: str | None, failed: TaskFailure) -> Failure:
        """The failure that is not retried; its message contains the number of attempts."""
        more = final_sentence(failed.kind, failed.failure.code, len(self.attempts_of(recipe).failures) + 1)
        return replace(failed.failure, message=f"{failed.failure.message}; {more}") if more else failed.failure


# Outcomes


def outcome_of(item: Item, result: JudgeResult, builds: Mapping[str, BuildResult]) -> Outcome:
    """Return the outcome of a judged item."""
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
    """Return the outcome of an item without a candidate: failed, or kept-eager if only eager was requested."""
    if not builds:
        reason = "no other recipe than eager was asked for that fits this class"
        return Outcome(**_identity(item), verdict="kept-eager", reason=reason)
    failures = {recipe: found.failure for recipe, found in builds.items() if found.failure is not None}
    messages = list(dict.fromkeys(failure.message for failure in failures.values()))
    reason = messages[0] if len(messages) == 1 else "; ".join(f"{name}: {found.message}" for name, found in failures.items())
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


def skipped_outcomes(problems: Iterable[CatalogError], unplaced: Iterable[Unplaced]) -> list[Outcome]:
    """Return the outcomes of bad entries, and of classes without a node, that --keep-going skips."""
    by_entry: dict[str, list[CatalogError]] = {}
    for problem in problems:
        by_entry.setdefault(problem.entry or "?", []).append(problem)
    return [
        *(_skipped(entry, "auto", "source", found) for entry, found in by_entry.items()),
        *(_skipped(item.model, item.device_class, "infrastructure", [item.problem]) for item in unplaced),
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
        "source": str(item.entry.source),
        "registered_name": item.entry.registered_name,
        "tags": dict(item.entry.tags),
        "source_key": item.source.digest,
        "judge_key": item.judge.digest,
    }


def _report(result: BuildResult) -> CandidateReport:
    """Report a build that was not judged, since it or the judge failed."""
    problem, kind = (result.failure.message or None, result.failure.kind) if result.failure else (None, None)
    return CandidateReport(recipe=result.recipe, build_key=result.key, problem=problem, failure=kind, build_s=result.wall_s)
