"""The state machine of an item, driven through random orders of the events that an executor can
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.failures import BY_CODE, MOST_ATTEMPTS, POLICY, decide
from pipeline.records import BuildResult, Failure
from pipeline.scheduling.item_state import (
    ItemState,
    Step,
    TaskFailure,
    end_build,
    end_judge,
    start,
)
from pipeline.worker import JudgeResult
from tests.support.one_node import item_of
from tests.support.outcomes import outcome

CLASSES = ("cpu-x86-64-v4", "portable")
RECIPES = ("inductor-frozen", "torchscript-frozen", "portable")
FAILURES = [(kind, "CP-X") for kind in POLICY] + [("memory", code) for code in BY_CODE]
"""Kinds and codes of failures of builds and judges."""

Name = tuple[str, str | None]
"""Device class and recipe of a task; None is the judge."""


def subset(names: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True) if names else st.just([])


def built_as(recipe: str, failure: str | None = None) -> BuildResult:
    found = Failure(kind=failure) if failure else None
    return BuildResult(key="k", recipe=recipe, failure=found, wall_s=10.0)


class LifeOfAModel(RuleBasedStateMachine):
    """Both classes of a model, and an executor that reports random ends of the queued tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, ItemState] = {}
        self.queued: list[Name] = []
        self.judging: list[Name] = []
        self.starts: Counter[Name] = Counter()
        self.allowed: Counter[Name] = Counter()
        self.recorded: Counter[Name] = Counter()
        self.outcomes: Counter[str] = Counter()

    def follow(self, step: Step) -> None:
        """Take the next state of an item, and count what the step asks for."""
        state = step.state
        device_class = state.item.device_class
        reached = state.outcome
        before = self.states.get(device_class, state)
        self.states[device_class] = state
        for recipe in step.queue:
            name = (device_class, recipe)
            assert name not in self.queued, "queued twice at the same time"
            self.queued.append(name)
            self.starts[name] += 1
        if step.result:
            self.recorded[device_class, step.result.recipe] += 1
        if reached is None:
            return
        self.outcomes[device_class] += 1
        assert (reached.failure is not None) == (reached.verdict == "failed")
        earlier = before.attempts_of(None).failures
        assert (
            reached.verdict != "unstable"
            or earlier.count("unstable") == 2
            or len(earlier) == MOST_ATTEMPTS - 1
        )

    @precondition(lambda self: all(state.outcome is not None for state in self.states.values()))
    @rule(data=st.data())
    def the_next_model_is_planned(self, data: st.DataObject) -> None:
        self.reset()
        for name in CLASSES:
            recipes = tuple(data.draw(subset(RECIPES)))
            finished = data.draw(subset(recipes))
            missed = tuple(
                data.draw(subset([recipe for recipe in recipes if recipe not in finished]))
            )
            before = outcome("m", device_class=name, cached=True) if missed else None
            state = ItemState(item=item_of(name, recipes, missed=missed, before=before))
            self.allowed.update({(name, recipe): 1 for recipe in (*recipes, None)})
            built = {recipe: built_as(recipe) for recipe in finished}
            hopeless = dict.fromkeys(data.draw(subset(recipes)), "slower before")
            self.follow(start(state, built, hopeless, first=data.draw(subset(recipes))))

    def take(self, data: st.DataObject) -> Name:
        return self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), failed=st.none() | st.sampled_from(FAILURES))
    def a_task_ends(self, data: st.DataObject, failed: tuple[str, str] | None) -> None:
        device_class, recipe = name = self.take(data)
        found = failed and Failure(kind=failed[0], code=failed[1], message="so it was")
        failure = found and TaskFailure(kind=found.kind, failure=found, node_id="n1")
        if failed is not None:
            self.allowed[name] += decide(*failed).attempts > 1
        state = self.states[device_class]
        if recipe is not None:
            hopeless = dict.fromkeys(data.draw(subset(RECIPES)), "slower before")
            self.follow(end_build(state, built_as(recipe), failure or None, hopeless))
            return
        verdict = data.draw(st.sampled_from(["published", "rejected"]))
        if found is not None:
            verdict = "unstable" if found.kind == "unstable" else "failed"
        contest = "" if state.needs_contest else data.draw(st.sampled_from(["", "unusual drift"]))
        self.allowed[name] += bool(contest)
        result = JudgeResult(verdict=verdict, reason="because", contest=contest)
        self.follow(end_judge(state, result, failure or None))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def a_task_is_given_up(self, data: st.DataObject) -> None:
        self.give_up(self.take(data))

    def give_up(self, name: Name) -> None:
        device_class, recipe = name
        state = self.states[device_class]
        if recipe is not None:
            self.follow(end_build(state, built_as(recipe, "infrastructure")))
        else:
            self.follow(end_judge(state, JudgeResult.of_failure(Failure(kind="infrastructure"))))

    @invariant()
    def a_queued_judge_has_all_builds(self) -> None:
        for device_class, recipe in self.queued:
            state = self.states[device_class]
            if recipe is None:
                assert set(state.results) == set(state.item.builds)
                assert state.built

    @invariant()
    def every_undecided_item_has_work(self) -> None:
        for device_class, state in self.states.items():
            decided = state.outcome is not None
            assert decided != any(name == device_class for name, _ in self.queued)
            assert self.outcomes[device_class] == decided, "exactly one outcome"

    @invariant()
    def attempts_are_bounded_and_have_a_reason(self) -> None:
        for name, num in self.starts.items():
            contests = self.states[name[0]].needs_contest  # a judge that starts anew has not failed
            assert num <= min(self.allowed[name], MOST_ATTEMPTS + contests)
            assert self.recorded[name] <= 1

    def teardown(self) -> None:
        """Give everything up; every item then has one outcome."""
        while self.queued:
            self.give_up(self.queued.pop())
        assert all(self.outcomes[name] == 1 for name in self.states)


LifeOfAModel.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, database=None
)
TestLifeOfAModel = LifeOfAModel.TestCase
