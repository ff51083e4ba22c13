"""Autoscaler requests and given-up tasks, as nodes come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.cluster import Ask, Done, Handle, Node, Turns
from pipeline.cluster.coordination import READ_S
from pipeline.planning import Demand
from pipeline.records import Event
from pipeline.scheduling.queue import Task
from pipeline.scheduling.scheduler import Places
from pipeline.worker import JudgeResult
from tests.pipeline.cluster.test_coordination import Clock, DictBoard
from tests.support.one_node import DEMAND, NoRay, OneNode, waiting

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"


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


@dataclass
class Here:
    """A fleet, its places, and what was reported."""

    fleet: Some
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def show(event: Event) -> None:
            self.notes.append(event.text)

        self.places = Places(self.fleet, show)

    def wait_for(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            (self.places.waiting if task.recipe else self.places.ready).append(task)

    def asked(self) -> Mapping[Ask, int]:
        """What is asked for after two rounds of a driver."""
        for _ in range(2):
            self.places.tick()
            assert self.places.given_up() == []
        return self.fleet.asked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr("pipeline.scheduling.scheduler.CHECK_S", 0.0)
    fleet = Some(NoRay(), tmp_path)
    fleet.have()
    return Here(fleet)


def test_builds_ask_for_at_most_twice_the_cores(here: Here) -> None:
    here.fleet.have(node("a", V4))
    here.wait_for([build() for _ in range(5)])
    assert here.asked() == {Ask(device_class=V4): 5}
    here.wait_for([build() for _ in range(50)])
    assert here.asked() == {Ask(device_class=V4): 8}


def test_asks_for_a_node_after_the_last_one_left(here: Here) -> None:
    here.fleet.have(node("a", V4))
    here.wait_for([judge() for _ in range(3)])
    here.asked()
    here.fleet.have()
    assert here.asked() == {Ask(device_class=V4, num_cpus=4): 1}
    assert here.notes[-1].startswith(f"no node serves {V4} now; waiting up to ")
    here.fleet.have(node("b", V4))
    assert here.asked() == {Ask(device_class=V4, num_cpus=4): 2}


def test_asks_for_a_node_that_fits_the_largest_judge(here: Here) -> None:
    here.wait_for([build(V3, 2), build(V4, 4), build(V4, 8)])
    assert here.asked() == {
        Ask(device_class=V3, num_cpus=2): 1,
        Ask(device_class=V4, num_cpus=8): 1,
    }


def test_asks_for_a_larger_node_beside_small_ones(here: Here) -> None:
    here.fleet.have(node("small", V4, num_cpus=2))
    here.wait_for([build() for _ in range(50)])
    assert here.asked() == {Ask(device_class=V4, num_cpus=4): 1}
    assert here.notes == [], "they are built meanwhile"


def test_asks_for_required_memory_but_not_estimates(here: Here) -> None:
    here.fleet.have(node("a", V4))
    limited = judge(Demand(asked=24 * 10**9, least=24 * 10**9))
    here.wait_for([limited, judge()])
    assert here.asked() == {
        Ask(device_class=V4, num_cpus=4, memory_bytes=24 * 10**9): 1,
        Ask(device_class=V4, num_cpus=4): 1,
    }


def test_judge_without_a_node_is_given_up(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.scheduling.fleet.GONE_S", 0.0)
    here.fleet.have(node("small", V4, num_cpus=2))
    here.wait_for([build()])
    here.places.tick()
    [(slot, task)] = here.places.builds(lambda _: True)
    here.places.enter(task, slot)
    assert here.places.given_up() == []
    alone = judge()
    here.wait_for([alone])
    [(found, failure)] = here.places.given_up()
    assert (found, failure.code) == (alone, "CP-NO-NODE")
    assert failure.message.startswith(f"no node serves {V4} with 4 CPUs, for 0 s; start one")


def test_tasks_without_enough_memory_are_given_up(here: Here) -> None:
    here.fleet.have(node("a", V4))
    large = Demand(asked=128 * 10**9, least=128 * 10**9)
    for task in (build(demand=large), judge(large)):
        here.wait_for([task])
        assert [(found, failure.kind) for found, failure in here.places.given_up()] == [
            (task, "memory")
        ]
    assert here.places.given_up() == []


def test_campaigns_claiming_one_node_do_not_deadlock(here: Here) -> None:
    board, ours, theirs = DictBoard(), Clock(), Clock()
    here.places.turns, other = Turns(board, ours), Turns(board, theirs)
    here.fleet.have(node("a", V4))
    first, second = judge(), judge()
    here.wait_for([first, second])
    here.places.tick()
    [(slot, started)] = here.places.judges(lambda _: True)
    here.places.enter([started], slot)
    other.claim("a")
    for clock in (ours, theirs):
        clock.now += READ_S
    other.tick()
    assert other.claimed("a")
    here.places.tick()
    here.places.leave(
        [started], Done(handle=Handle(1), value=JudgeResult(key="j", verdict="rejected", reason=""))
    )
    assert list(here.places.judges(lambda _: not here.places.turns.claimed("a"))) == [], (
        "something has to be brought"
    )
    assert list(here.places.ready) == [second]
    theirs.now += READ_S
    other.tick()
    assert not other.claimed("a")


def test_waiting_judge_is_reported_once(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.scheduling.scheduler.JUDGE_HELD_S", 0.0)
    monkeypatch.setattr(
        here.fleet.cluster, "held", lambda _: "in use are 1 of its 4 CPUs", raising=False
    )
    here.fleet.have(node("a", V4))
    here.wait_for([judge()])
    here.places.tick()
    [(slot, started)] = here.places.judges(lambda _: True)
    here.places.enter([started], slot)
    for _ in range(2):
        here.places.tick()
    assert here.notes == [
        "judge waits for node a: in use are 1 of its 4 CPUs; it starts when nothing else runs there"
    ]
