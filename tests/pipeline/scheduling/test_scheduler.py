"""Autoscaler requests and given-up tasks, as nodes come and go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.cluster import Ask, Node
from pipeline.planning import Demand
from pipeline.scheduling.item_state import ItemState
from pipeline.scheduling.queue import Progress, Task
from pipeline.scheduling.scheduler import Scheduler
from tests.support.one_node import DEMAND, NoRay, OneNode, item_of, waiting

V3 = "cpu-x86-64-v3"
V4 = "cpu-x86-64-v4"


def build(name: str = V4, judge_cpus: int = 4, demand: Demand = DEMAND) -> Task:
    return waiting(name, recipe="portable", judge_cpus=judge_cpus, demand=demand)


def judge(demand: Demand = DEMAND) -> Task:
    return waiting(V4, judge_cpus=4, demand=demand)


class Some(OneNode):
    """Records what was asked for last."""

    asked: Mapping[Ask, int] = {}

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        self.asked = dict(wanted)


def node(name: str, *classes: str, num_cpus: int = 4) -> Node:
    return Node(
        node_id=name, num_cpus=num_cpus, classes=(*classes, "portable"), memory_bytes=64 * 10**9
    )


class Here(Scheduler):
    """The scheduler of a fleet."""

    def __init__(self, fleet: Some) -> None:
        self.fleet = fleet
        super().__init__(fleet)

    def wait_for(self, *tasks: Task) -> None:
        for task in tasks:
            self.add(task)

    def asked(self) -> Mapping[Ask, int]:
        """What is asked for after two rounds of a driver."""
        for _ in range(2):
            self.tick()
            assert self.given_up() == []
        return self.fleet.asked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr("pipeline.scheduling.scheduler.CHECK_S", 0.0)
    fleet = Some(NoRay(), tmp_path)
    fleet.have()
    return Here(fleet)


def test_builds_ask_for_at_most_twice_the_cores(here: Here) -> None:
    here.fleet.have(node("a", V4))
    here.wait_for(*[build() for _ in range(5)])
    assert here.asked() == {Ask(device_class=V4): 5}
    here.wait_for(*[build() for _ in range(50)])
    assert here.asked() == {Ask(device_class=V4): 8}


def test_asks_for_a_node_after_the_last_one_left(here: Here) -> None:
    here.fleet.have(node("a", V4))
    here.wait_for(judge(), judge(), judge())
    here.asked()
    here.fleet.have()
    assert here.asked() == {Ask(device_class=V4, num_cpus=4): 1}
    here.fleet.have(node("b", V4))
    assert here.asked() == {Ask(device_class=V4): 3}


def test_asks_for_a_node_that_fits_the_largest_judge(here: Here) -> None:
    here.wait_for(build(V3, 2), build(V4, 4), build(V4, 8))
    assert here.asked() == {
        Ask(device_class=V3, num_cpus=2): 1,
        Ask(device_class=V4, num_cpus=8): 1,
    }


def test_asks_for_a_larger_node_beside_small_ones(here: Here) -> None:
    here.fleet.have(node("small", V4, num_cpus=2))
    here.wait_for(*[build() for _ in range(50)])
    assert here.asked() == {Ask(device_class=V4, num_cpus=4): 1}


def test_judge_without_a_node_is_given_up(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here.fleet, "patience_s", 0.0)
    here.fleet.have(node("small", V4, num_cpus=2))
    here.wait_for(build())
    here.tick()
    [(slot, tasks)] = here.next_tasks()
    here.record_start(tasks, slot)
    assert here.given_up() == []
    alone = judge()
    here.wait_for(alone)
    [(task, failure)] = here.given_up()
    assert (task, failure.code) == (alone, "CP-NO-NODE")


def test_until_the_first_judge_all_cores_share_one_item(here: Here) -> None:
    here.fleet.have(node("a", V4, num_cpus=2))
    recipes = ("openvino", "onnxruntime", "torchscript-frozen", "inductor-frozen")
    for index in range(3):
        state = ItemState(item=item_of(V4, recipes), estimate=DEMAND)
        progress = Progress(state=state, index=index)
        here.wait_for(*[Task(progress=progress, recipe=recipe) for recipe in recipes])
    here.tick()
    groups = []
    for slot, tasks in here.next_tasks():
        here.record_start(tasks, slot)
        groups.append([(task.progress.index, task.recipe) for task in tasks])
    shares = [(0, recipe) for recipe in recipes]
    assert groups == [shares[:2], shares[2:]]


@pytest.mark.parametrize("num_builds", [0, 1])
def test_portable_is_judged_beside_its_class(here: Here, num_builds: int) -> None:
    here.fleet.have(node("a", V4, num_cpus=2))
    here.wait_for(waiting("portable"))
    here.tick()
    assert len([*here.next_tasks()]) == 1, "the first judge"
    of_class = ItemState(item=item_of(V4, ["openvino"] * num_builds), estimate=DEMAND)
    progress = Progress(state=of_class, index=0)
    portable = waiting("portable")
    portable.progress.beside = progress
    other = Task(progress=Progress(state=of_class, index=1), recipe="openvino")
    here.wait_for(portable, other)
    here.tick()
    first, *_ = [tasks for _, tasks in here.next_tasks()]
    assert first == ([other] if num_builds else [portable]), "before it only if that is not built"


def test_tasks_without_enough_memory_are_given_up(here: Here) -> None:
    here.fleet.have(node("a", V4))
    large = Demand(asked=128 * 10**9, least=128 * 10**9)
    for task in (build(demand=large), judge(large)):
        here.wait_for(task)
        [(given_up, failure)] = here.given_up()
        assert (given_up, failure.kind) == (task, "memory")
    assert here.given_up() == []
