"""The life of an item as a state machine, without Ray, I/O or a clock.

    builds -> judge -> outcome

`advance` maps a state and an event to the next state and the actions to perform. A failed judge
gets another attempt, after new builds if a candidate was damaged. The retry table is
pipeline/failures/policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.failures import attempts_left, decide, final_sentence
from pipeline.planning import Demand, Item, corrected, learned
from pipeline.records import SKIPPED, Failure, Outcome
from pipeline.scheduling.outcomes import failed_outcome, outcome_of
from pipeline.worker import BuildResult, JudgeResult

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
class ItemState:
    """The state of one item.

    Attributes:
        estimate: of its memory; at least the peak of its finished builds.
        results: final results of builds, by recipe; of skipped ones, the reason is their failure.
        waiting: recipes whose turn to be queued or skipped has not come.
        attempts: failed attempts, by recipe; None is the judge.
        num_damages: how often a judge found a candidate damaged.
        outcome: once decided.
    """

    item: Item
    estimate: Demand = NO_DEMAND
    results: Mapping[str, BuildResult] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    attempts: Mapping[str | None, Attempts] = field(default_factory=dict)
    num_damages: int = 0
    outcome: Outcome | None = None

    def attempts_of(self, recipe: str | None) -> Attempts:
        """The failed attempts of a build, or of the judge."""
        return self.attempts.get(recipe, Attempts())

    def demand_of(self, recipe: str | None) -> Demand:
        """The memory that the next attempt of a build or judge needs."""
        memory_bytes = self.attempts_of(recipe).memory_bytes
        return self.estimate if memory_bytes is None else corrected(self.estimate, memory_bytes)


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


# Events


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The item enters the executor.

    Attributes:
        finished: the builds that earlier campaigns finished, by recipe.
        hopeless: recipes to skip, each with the reason.
        one_first: whether to wait for the first build, which reports the recipes to skip.
    """

    finished: Mapping[str, BuildResult]
    hopeless: Mapping[str, str] = field(default_factory=dict)
    one_first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandKnown:
    """The files of the model are here, so its memory can be estimated."""

    demand: Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildEnded:
    """A build ended. `failed` is set if the retry table applies; a build that never started has a
    failed result alone.

    `hopeless` as in Start.
    """

    result: BuildResult
    failed: TaskFailure | None = None
    hopeless: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeEnded:
    """The judge ended; `failed` as in BuildEnded, and also set for the verdict `unstable`.

    Attributes:
        gone: recipes whose candidate was damaged and removed.
    """

    result: JudgeResult
    failed: TaskFailure | None = None
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeKnown:
    """The outcome is known without a judge: from an earlier campaign, or one that runs at the same
    time.
    """

    outcome: Outcome


ItemEvent = Start | DemandKnown | BuildEnded | JudgeEnded | OutcomeKnown


# Actions


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTask:
    """Queue a build, or the judge if `recipe` is None; `first` puts it before the other tasks of
    its class.
    """

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
Step = tuple[ItemState, tuple[ItemAction, ...]]


def advance(state: ItemState, event: ItemEvent) -> Step:
    """Return the state after an event, and the actions to perform in order."""
    match event:
        case Start(finished=finished, hopeless=hopeless, one_first=one_first):
            waiting = tuple(recipe for recipe in state.item.builds if recipe not in finished)
            state = replace(state, results=finished, waiting=waiting)
            return _take_turns(state, (), hopeless, one_first=one_first)
        case DemandKnown(demand=demand):
            return (
                replace(state, estimate=demand) if demand.asked > state.estimate.asked else state
            ), ()
        case BuildEnded():
            return _after_build(state, event)
        case JudgeEnded():
            return _after_judge(state, event)
        case OutcomeKnown(outcome=outcome):
            return _decided(state, outcome)


def _after_build(state: ItemState, event: BuildEnded) -> Step:
    result, failed = event.result, event.failed
    if result.failure is not None and result.failure.kind == SKIPPED:
        note = ShowNote(text=f"{state.item.label(result.recipe)}: {result.failure.message}")
        return _take_turns(
            replace(state, results={**state.results, result.recipe: result}),
            (note,),
            event.hopeless,
        )
    if failed is not None:
        retried = _retry(state, result.recipe, failed)
        if retried is not None:
            return retried
        result = replace(result, failure=_final(failed, state.attempts_of(result.recipe)))
    results = {**state.results, result.recipe: result}
    state = replace(state, results=results, estimate=learned(state.estimate, result.peak_bytes))
    return _take_turns(state, (RecordBuild(result=result),), event.hopeless)


def _take_turns(
    state: ItemState,
    actions: tuple[ItemAction, ...],
    hopeless: Mapping[str, str],
    *,
    one_first: bool = False,
) -> Step:
    """Skip waiting builds that are hopeless or out of time, and queue those whose turn it is: all,
    or the first one.
    """
    item = state.item
    skipped = {recipe: why for recipe, why in hopeless.items() if recipe in state.waiting}
    under_way = len(item.builds) - len(state.results) - len(state.waiting)
    if not under_way and (over := _over_build_s(state)):
        skipped = dict.fromkeys(state.waiting, over) | skipped
    left = tuple(recipe for recipe in state.waiting if recipe not in skipped)
    turn = left[:1] if one_first else left
    results = {
        recipe: BuildResult(
            key=item.builds[recipe].digest,
            recipe=recipe,
            failure=Failure(kind=SKIPPED, message=f"{SKIPPED}: {why}"),
        )
        for recipe, why in skipped.items()
    }
    state = replace(state, results={**state.results, **results}, waiting=left[len(turn) :])
    notes = tuple(
        ShowNote(text=f"{item.label(recipe)}: {SKIPPED}: {why}") for recipe, why in skipped.items()
    )
    return _check_built(state, (*actions, *notes, *(QueueTask(recipe=recipe) for recipe in turn)))


def _over_build_s(state: ItemState) -> str | None:
    """Why no further recipe is built: limits.build_s; None if one may be."""
    return state.item.entry.limits.over_build_s(
        sum(result.wall_s for result in state.results.values())
    )


def _check_built(state: ItemState, actions: tuple[ItemAction, ...]) -> Step:
    """Queue the judge if all builds ended and one succeeded, or decide if no build succeeded."""
    item, results = state.item, state.results
    if len(results) < len(item.builds):
        return state, actions
    spared = tuple(
        recipe
        for recipe, result in results.items()
        if result.failure and result.failure.kind == SKIPPED
    )
    if (
        spared
        and not _over_build_s(state)
        and all(result.failure is not None for result in results.values())
    ):  # a hopeless one is better than none
        kept = {recipe: result for recipe, result in results.items() if recipe not in spared}
        return _take_turns(replace(state, results=kept, waiting=spared), actions, {})
    if item.before is not None and all(
        results[recipe].failure is not None for recipe in item.missed
    ):
        return _decided(state, item.before, actions)
    if any(result.failure is None for result in results.values()):
        return state, (*actions, QueueTask(recipe=None))
    return _decided(state, failed_outcome(item, results), actions)


def _after_judge(state: ItemState, event: JudgeEnded) -> Step:
    item, result, failed = state.item, event.result, event.failed
    if failed is not None:
        rebuild = decide(failed.kind, failed.failure.code).rebuild
        again = _rebuild(state, failed, event.gone) if rebuild else _retry(state, None, failed)
        if again is not None:
            return again
        final = _final(failed, state.attempts_of(None))
        result = replace(
            result, reason=final.message, failure=final if result.verdict == "failed" else None
        )
    outcome = outcome_of(item, result, state.results)
    if item.before is not None and outcome.verdict in ("failed", "unstable"):
        text = (
            f"{item.label()}: re-validation failed ({outcome.coded_reason}); keeping the previous"
            " result"
        )
        return _decided(state, item.before, (ShowNote(text=text),))
    return _decided(state, outcome)


def _decided(state: ItemState, outcome: Outcome, actions: tuple[ItemAction, ...] = ()) -> Step:
    return replace(state, outcome=outcome), (*actions, Decide(outcome=outcome))


def _rebuild(state: ItemState, failed: TaskFailure, gone: tuple[str, ...]) -> Step | None:
    """Build removed candidates again, with all attempts, if the policy allows it."""
    num_damages = state.num_damages + 1
    if not gone or not attempts_left([failed.kind] * num_damages, failed.kind, failed.failure.code):
        return None
    state = replace(
        state,
        num_damages=num_damages,
        results={recipe: result for recipe, result in state.results.items() if recipe not in gone},
        attempts={
            recipe: attempts
            for recipe, attempts in state.attempts.items()
            if recipe is not None and recipe not in gone
        },
    )
    text = f"{state.item.label()}: {failed.failure.message}; building {', '.join(gone)} again"
    return state, (ShowNote(text=text), *(QueueTask(recipe=recipe) for recipe in gone))


def _retry(state: ItemState, recipe: str | None, failed: TaskFailure) -> Step | None:
    """Queue a failed build or judge for another attempt, if the policy allows one."""
    before = state.attempts_of(recipe)
    failures = (*before.failures, failed.kind)
    left = attempts_left(failures, failed.kind, failed.failure.code)
    if not left:
        return None
    decision, how = decide(failed.kind, failed.failure.code), ""
    avoid, memory_bytes = before.avoid, before.memory_bytes
    if decision.elsewhere and failed.node_id is not None:
        avoid, how = avoid | {failed.node_id}, ", on another node if there is one"
    if decision.more_memory:
        used_bytes = max(
            failed.peak_bytes, failed.failure.tried_bytes or 0
        )  # 0 if Ray killed the worker
        memory_bytes = 2 * max(state.demand_of(recipe).asked, used_bytes)
        how = f", with {memory_bytes / 1e9:.1f} GB kept free"
    attempts = Attempts(failures=failures, avoid=avoid, memory_bytes=memory_bytes)
    number = len(failures) + 1
    what = f"{state.item.label(recipe)}: {failed.failure.kind}: {failed.failure.message}"
    state = replace(state, attempts={**state.attempts, recipe: attempts})
    return state, (
        ShowNote(text=f"{what}; attempt {number} of {number - 1 + left}{how}"),
        QueueTask(recipe=recipe, first=not decision.later),
    )


def _final(failed: TaskFailure, before: Attempts) -> Failure:
    """The failure that is not retried; its message contains the number of attempts."""
    more = final_sentence(failed.kind, failed.failure.code, len(before.failures) + 1)
    return (
        replace(failed.failure, message=f"{failed.failure.message}; {more}")
        if more
        else failed.failure
    )
