"""The life of an item as a state machine, without Ray, I/O or a clock.

    builds -> judge -> outcome

Each event is a function from a state to a Step: the next state, and what to do now. The retry
table is pipeline/failures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from freezer.codec import frozen
from pipeline.failures import attempts_left, decide, final_sentence
from pipeline.planning import Demand, Item, learned
from pipeline.records import SKIPPED, BuildResult, Failure, Outcome
from pipeline.scheduling.outcomes import Builds, failed_outcome, outcome_of
from pipeline.worker import JudgeResult

NO_DEMAND = Demand(asked=0, least=0)


@frozen
class Attempts:
    """The failed attempts of one build or judge, and where the next one may run.

    Attributes:
        failures: kinds of the failures in this campaign, as in pipeline/failures.py.
        avoid: ids of nodes to use only if no other node serves the class.
        memory_bytes: memory to reserve; None reserves the estimate of the item.
    """

    failures: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()
    memory_bytes: int | None = None


@frozen
class ItemState:
    """The state of one item.

    Attributes:
        estimate: memory of a task; at least the peak of the finished builds.
        results: final results of builds, by recipe.
        waiting: recipes that are neither queued nor skipped yet.
        attempts: failed attempts, by recipe; None is the judge.
        needs_contest: whether a judge found that the winner cannot inherit its speed.
        outcome: the outcome, once it is decided.
    """

    item: Item
    estimate: Demand = NO_DEMAND
    results: Builds = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    attempts: Mapping[str | None, Attempts] = field(default_factory=dict)
    needs_contest: bool = False
    outcome: Outcome | None = None

    @property
    def is_built(self) -> bool:
        """Whether all builds ended."""
        return len(self.results) >= len(self.item.builds)

    @property
    def built(self) -> dict[str, BuildResult]:
        """The builds that succeeded, by recipe."""
        return {recipe: result for recipe, result in self.results.items() if result.failure is None}

    def attempts_of(self, recipe: str | None) -> Attempts:
        """Return the failed attempts of a build, or of the judge."""
        return self.attempts.get(recipe, Attempts())

    def demand_of(self, recipe: str | None) -> Demand:
        """Return the memory that the next attempt of a build or judge needs."""
        estimate, least = self.estimate, self.attempts_of(recipe).memory_bytes
        if least is None:
            return estimate
        return replace(estimate, asked=max(least, estimate.asked), firm=True)

    def with_files(self, demand: Demand) -> ItemState:
        """Return the state with the demand of a model whose files are here, if it is larger."""
        return replace(self, estimate=demand) if demand.asked > self.estimate.asked else self


@frozen
class TaskFailure:
    """Why an attempt failed, reported by Ray or by the task itself.

    Attributes:
        kind: key of the retry table.
        failure: failure to report if it is final.
        node_id: node where the attempt ran.
        peak_bytes: largest memory of the attempt; 0 if unknown.
    """

    kind: str
    failure: Failure
    node_id: str
    peak_bytes: int = 0


@frozen
class Step:
    """What follows from an event.

    Attributes:
        state: the next state; if it has an outcome, the outcome is to be published.
        queue: builds to queue, by recipe; None is the judge.
        first: whether to queue them before the other tasks of their class.
        notes: lines for the user.
        result: final result of a build, to be recorded.
    """

    state: ItemState
    queue: tuple[str | None, ...] = ()
    first: bool = False
    notes: tuple[str, ...] = ()
    result: BuildResult | None = None


def start(
    state: ItemState,
    finished: Builds,
    hopeless: Mapping[str, str],
    *,
    first: Sequence[str] = (),
) -> Step:
    """The item enters the executor.

    Args:
        finished: builds that earlier campaigns finished, by recipe.
        hopeless: recipes to skip, each with the reason.
        first: recipes to build before the others, if any; they report the recipes to skip.
    """
    state = replace(
        state,
        results=finished,
        waiting=tuple(recipe for recipe in state.item.builds if recipe not in finished),
    )
    return _queue_builds(Step(state=state), hopeless, first=first)


def end_build(
    state: ItemState,
    result: BuildResult,
    failed: TaskFailure | None = None,
    hopeless: Mapping[str, str] = {},
) -> Step:
    """A build ended, or could not be started.

    Args:
        result: result of the build.
        failed: failure that the retry table applies to; None for a build that never started.
        hopeless: recipes to skip, each with the reason.
    """
    recipe = result.recipe
    if failed is not None:
        retried = _retry(state, recipe, failed)
        if retried is not None:
            return retried
        result = replace(result, failure=_final(state, recipe, failed))
    state = replace(
        state,
        results={**state.results, recipe: result},
        estimate=learned(state.estimate, result.peak_bytes),
    )
    return _queue_builds(Step(state=state, result=result), hopeless)


def end_judge(
    state: ItemState,
    result: JudgeResult,
    failed: TaskFailure | None = None,
) -> Step:
    """The judge ended, or could not be started.

    Args:
        result: result of the judge.
        failed: as in `end_build`; also given for the verdict `unstable`.
    """
    item = state.item
    why = result.left_out
    left_out = {recipe: replace(state.results[recipe], failure=why[recipe]) for recipe in why}
    results = {**state.results, **left_out}
    without = replace(state, results=results)
    if result.contest:
        return _begin_contest(without, result.contest)
    if failed is not None:
        # Without a candidate, another node judges them all.
        retried = _retry(without if without.built else state, None, failed)
        if retried is not None:
            return retried
        final = _final(state, None, failed)
        failure = final if result.verdict == "failed" else None
        result = replace(
            result,
            reason=final.message,
            failure=failure,
        )
    outcome = outcome_of(item, result, results)
    notes: tuple[str, ...] = ()
    if item.before is not None and outcome.verdict in ("failed", "unstable"):
        notes = (
            f"{item.label()}: re-validation failed ({outcome.coded_reason}); keeping the previous"
            " result",
        )
        outcome = item.before
    return Step(state=replace(without, outcome=outcome), notes=notes)


def _begin_contest(state: ItemState, why: str) -> Step:
    """Build what was skipped, and judge all."""
    state = replace(_unskipped(state), needs_contest=True)
    note = f"{state.item.label()}: {why}; timing every recipe"
    return _queue_builds(Step(state=state, notes=(note,)), {})


def _unskipped(state: ItemState) -> ItemState:
    """Return the state in which the builds that were skipped wait."""
    skipped = tuple(recipe for recipe, result in state.results.items() if result.is_skipped)
    results = {name: state.results[name] for name in state.results if name not in skipped}
    return replace(state, results=results, waiting=skipped)


def _queue_builds(step: Step, hopeless: Mapping[str, str], *, first: Sequence[str] = ()) -> Step:
    """Skip waiting builds that are hopeless. Queue the others, or those that come first."""
    state = step.state
    waiting = state.waiting
    skipped = {}
    notes = [*step.notes]
    for recipe in waiting:
        if recipe in hopeless:
            failure = Failure(kind=SKIPPED, message=f"{SKIPPED}: {hopeless[recipe]}")
            key = state.item.builds[recipe].digest
            skipped[recipe] = BuildResult(key=key, recipe=recipe, failure=failure)
            notes.append(f"{state.item.label(recipe)}: {failure.message}")
    others = tuple(recipe for recipe in waiting if recipe not in skipped)
    queue = tuple(recipe for recipe in others if recipe in first) or others
    state = replace(
        state,
        results={**state.results, **skipped},
        waiting=tuple(recipe for recipe in others if recipe not in queue),
    )
    return _check_built(replace(step, state=state, queue=queue, notes=tuple(notes)))


def _check_built(step: Step) -> Step:
    """Queue the judge if all builds ended and one succeeded. Decide if none succeeded."""
    state = step.state
    item = state.item
    results = state.results
    built = state.built
    if not state.is_built:
        return step
    # a hopeless one is better than none
    if not built and any(result.is_skipped for result in results.values()):
        return _queue_builds(replace(step, state=_unskipped(state)), {})
    if item.before is not None and built.keys().isdisjoint(item.missed):
        return replace(step, state=replace(state, outcome=item.before))
    if built:
        return replace(step, queue=(None,))
    return replace(step, state=replace(state, outcome=failed_outcome(item, results)))


def _retry(state: ItemState, recipe: str | None, failed: TaskFailure) -> Step | None:
    """Queue a failed build or judge for another attempt, if the policy allows one."""
    failure = failed.failure
    attempts = state.attempts_of(recipe)
    failures = (*attempts.failures, failed.kind)
    num_left = attempts_left(failures, failed.kind, failure.code)
    if not num_left:
        return None
    decision = decide(failed.kind, failure.code)
    how = ""
    attempts = replace(attempts, failures=failures)
    if decision.elsewhere:
        attempts = replace(attempts, avoid=attempts.avoid | {failed.node_id})
        how = ", on another node if there is one"
    if decision.more_memory:
        used_bytes = max(failed.peak_bytes, failure.tried_bytes or 0)
        memory_bytes = 2 * max(state.demand_of(recipe).asked, used_bytes)
        attempts = replace(attempts, memory_bytes=memory_bytes)
        how = f", with {memory_bytes / 1e9:.1f} GB kept free"
    number = len(failures) + 1
    note = (
        f"{state.item.label(recipe)}: {failure.kind}: {failure.message}; attempt"
        f" {number} of {number - 1 + num_left}{how}"
    )
    state = replace(state, attempts={**state.attempts, recipe: attempts})
    return Step(
        state=state,
        queue=(recipe,),
        first=not decision.later,
        notes=(note,),
    )


def _final(state: ItemState, recipe: str | None, failed: TaskFailure) -> Failure:
    """Return a failure that is not retried; its message contains the number of attempts."""
    failure = failed.failure
    num_attempts = len(state.attempts_of(recipe).failures) + 1
    sentence = final_sentence(failed.kind, failure.code, num_attempts)
    message = f"{failure.message}; {sentence}" if sentence else failure.message
    return replace(failure, message=message)
