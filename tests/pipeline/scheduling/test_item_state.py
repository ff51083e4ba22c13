"""The state machine of an item, driven through random orders of the events that an executor can report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.failures.policy import BY_CODE, MOST_ATTEMPTS, POLICY, decide
from pipeline.records.outcome import Failure, Outcome
from pipeline.scheduling.item_state import Decide, ItemAction, ItemState, QueueTask, RecordBuild, TaskFailure
from pipeline.worker.requests import BuildResult, JudgeResult
from tests.pipeline.one_node import item_of

CLASSES, RECIPES = ("cpu-x86-64-v4", "portable"), ("inductor-frozen", "torchscript-frozen", "portable")
FAILURES = [(kind, "CP-X") for kind in POLICY if kind != "damage"] + [("memory", code) for code in BY_CODE]
"""Kinds and codes of failures of builds and judges."""

MOST_DAMAGES = POLICY["damage"].attempts
Name = tuple[str, str | None]
"""Device class and recipe of a task; None is the judge."""


def outcome_of_earlier(device_class: str) -> Outcome:
    return Outcome(
        model="m",
        device_class=device_class,
        verdict="published",
        reason=None,
        num_threads=2,
        source="s",
        source_key="",
        judge_key="",
        cached=True,
    )


def subset(names: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True) if names else st.just([])


class LifeOfAModel(RuleBasedStateMachine):
    """Both classes of a model, and an executor that reports random ends of the queued tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, ItemState] = {}
        self.queued: list[Name] = []
        self.starts: Counter[Name] = Counter()
        self.allowed: Counter[Name] = Counter()
        self.recorded: Counter[Name] = Counter()
        self.rebuilds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def perform(self, device_class: str, actions: Sequence[ItemAction]) -> None:
        for action in actions:
            match action:
                case QueueTask(recipe=recipe):
                    name = (device_class, recipe)
                    assert name not in self.queued, "queued twice at the same time"
                    self.queued.append(name)
                    self.starts[name] += 1
                case RecordBuild(result=result):
                    self.recorded[device_class, result.recipe] += 1
                case Decide(outcome=outcome):
                    self.outcomes[device_class] += 1
                    assert outcome == self.states[device_class].outcome

    @precondition(lambda self: all(state.outcome is not None for state in self.states.values()))
    @rule(data=st.data())
    def the_next_model_is_planned(self, data: st.DataObject) -> None:
        self.reset()
        for name in CLASSES:
            recipes = tuple(data.draw(subset(RECIPES)))
            finished = data.draw(subset(recipes))
            missed = tuple(data.draw(subset([recipe for recipe in recipes if recipe not in finished])))
            before = outcome_of_earlier(name) if missed else None
            state = self.states[name] = ItemState(item=item_of(name, recipes, missed=missed, before=before))
            self.allowed.update({(name, recipe): 1 for recipe in (*recipes, None)})
            self.perform(name, state.start({recipe: self.built(name, recipe) for recipe in finished}))

    def built(self, device_class: str, recipe: str, failure: str | None = None) -> BuildResult:
        return BuildResult(
            key=self.states[device_class].item.builds[recipe].digest,
            recipe=recipe,
            failure=Failure(kind=failure) if failure else None,
        )

    def take(self, data: st.DataObject) -> Name:
        return self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))

    def take_judge(self) -> ItemState:
        name = next(name for name in self.queued if name[1] is None)
        self.queued.remove(name)
        return self.states[name[0]]

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), failed=st.none() | st.sampled_from(FAILURES))
    def a_task_ends(self, data: st.DataObject, failed: tuple[str, str] | None) -> None:
        device_class, recipe = name = self.take(data)
        failure = None
        if failed is not None:
            found = Failure(kind=failed[0], code=failed[1], message="so it was")
            failure = TaskFailure(kind=found.kind, failure=found, node_id="n1")
            self.allowed[name] += decide(*failed).attempts > 1
        state = self.states[device_class]
        if recipe is not None:
            self.perform(device_class, state.build_ended(self.built(device_class, recipe), failure))
            return
        verdict = data.draw(st.sampled_from(["published", "rejected", "unstable"]))
        result = JudgeResult(key="j", verdict="failed" if failure else verdict, reason="because")
        self.perform(device_class, state.judge_ended(result, failure))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def a_task_is_given_up(self, data: st.DataObject) -> None:
        device_class, recipe = self.take(data)
        state = self.states[device_class]
        if recipe is not None:
            self.perform(device_class, state.build_ended(self.built(device_class, recipe, "infrastructure")))
        else:
            self.perform(device_class, state.judge_ended(JudgeResult.of_failure("j", Failure(kind="infrastructure"))))

    @precondition(lambda self: any(recipe is None for _, recipe in self.queued))
    @rule(data=st.data())
    def a_judge_finds_damage(self, data: st.DataObject) -> None:
        state = self.take_judge()
        name = state.item.device_class
        gone = tuple(data.draw(subset([recipe for recipe, result in state.results.items() if result.failure is None])))
        self.allowed.update({(name, recipe): 1 for recipe in (*gone, None)})
        found = Failure(kind="disk", code="CP-INTEGRITY", message="a byte differs")
        failure = TaskFailure(kind="damage", failure=found)
        self.perform(name, state.judge_ended(JudgeResult.of_failure("j", found), failure, gone))
        self.rebuilds[name] += state.outcome is None
        assert self.rebuilds[name] < MOST_DAMAGES

    @precondition(lambda self: any(recipe is None for _, recipe in self.queued))
    @rule()
    def another_campaign_was_faster(self) -> None:
        state = self.take_judge()
        self.perform(state.item.device_class, state.decided(outcome_of_earlier(state.item.device_class)))

    @invariant()
    def a_queued_judge_has_all_builds(self) -> None:
        for device_class, recipe in self.queued:
            state = self.states[device_class]
            if recipe is None:
                assert set(state.results) == set(state.item.builds)
                assert any(result.failure is None for result in state.results.values())

    @invariant()
    def every_undecided_item_has_work(self) -> None:
        for device_class, state in self.states.items():
            decided = state.outcome is not None
            assert decided != any(name == device_class for name, _ in self.queued)
            assert self.outcomes[device_class] == decided, "exactly one outcome"

    @invariant()
    def attempts_are_bounded_and_have_a_reason(self) -> None:
        for name, num in self.starts.items():
            assert num <= min(self.allowed[name], MOST_ATTEMPTS * MOST_DAMAGES)
            assert self.recorded[name] <= MOST_DAMAGES

    def teardown(self) -> None:
        """Give everything up; every item then has one outcome."""
        while self.queued:
            device_class, recipe = self.queued.pop()
            state = self.states[device_class]
            if recipe is not None:
                self.perform(device_class, state.build_ended(self.built(device_class, recipe, "error")))
            else:
                self.perform(device_class, state.judge_ended(JudgeResult(key="j", verdict="rejected", reason="r")))
        assert all(self.outcomes[name] == 1 for name in self.states)


LifeOfAModel.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, database=None)
TestLifeOfAModel = LifeOfAModel.TestCase
