"""Which nodes a campaign uses, and for which classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import InfrastructureError
from pipeline.cluster import Done, Handle, Node
from pipeline.records import ClassFacts, Event
from pipeline.scheduling import Fleet, SharedFiles
from pipeline.scheduling.node_check import Inspected
from tests.support.one_node import NoRay

V4 = "cpu-x86-64-v4"
GPU = "cuda-sm90"
PLAIN = {"torch": "2.13.0", "driver": None}
NEWER = {"torch": "2.14.0", "cuda": "13.0"}
ON_GPU = {"torch": "2.13.0", "driver": "570.1"}


def facts_of(toolchain: Mapping[str, Any], num_threads: int = 4) -> ClassFacts:
    return ClassFacts(num_threads=num_threads, toolchain=toolchain, memory_bytes=8 * 10**9)


class Answers(NoRay):
    """A cluster whose nodes answer a probe at once; `broken` ones have no driver that works, GPUs
    of `held` ones never do, and `newer` ones have a newer torch."""

    def __init__(
        self,
        nodes: Sequence[Node],
        broken: Sequence[str] = (),
        held: Sequence[str] = (),
        newer: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._nodes = list(nodes)
        self._broken = broken
        self._held = held
        self._newer = newer
        self._ended = list[Done]()

    def nodes(self) -> list[Node]:
        return self._nodes

    def problem(self, node: Node) -> str | None:
        """Why a node cannot use the store."""
        return None

    def start(  # type: ignore[override]
        self, _: Callable[..., Any], *args: Any, class_name: str, node: Node, **__: Any
    ) -> Handle:
        on_gpu = class_name == GPU
        name = node.node_id
        handle = (name, class_name)
        self._ended = [done for done in self._ended if done.handle != handle]
        toolchain = NEWER if name in self._newer else PLAIN
        facts = facts_of(ON_GPU if on_gpu else toolchain, args[1])
        done = Done(handle=handle, value=Inspected(facts=facts, problem=self.problem(node)))
        if on_gpu and name in self._broken:
            done = Done(handle=handle, failure="RuntimeError: no driver")
        if not on_gpu or name not in self._held:
            self._ended.append(done)
        return handle

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        return [done for done in self._ended if done.handle in handles]


def node(name: str, *classes: str, num_cpus: int = 4, num_gpus: int = 0) -> Node:
    return Node(node_id=name, num_cpus=num_cpus, classes=(*classes, "portable"), num_gpus=num_gpus)


def fleet_of(
    folder: Path,
    cluster: Answers,
    before: Mapping[str, ClassFacts] | None = None,
    *,
    wanted: Sequence[str] = ("auto",),
) -> tuple[Fleet, list[str]]:
    notes: list[str] = []

    def show(event: Event) -> None:
        notes.append(event.text)

    shared = SharedFiles(store=folder, files=folder)
    fleet = Fleet(cluster, show, shared, wait_s=None, before=before)
    with fleet.assembled(wanted):
        return fleet, notes


def test_gpus_and_cpus_report_their_toolchains(tmp_path: Path) -> None:
    fleet, notes = fleet_of(tmp_path, Answers([node("a", GPU, V4, num_gpus=1), node("b", V4)]))
    facts = fleet.facts()
    assert {name: found.toolchain for name, found in facts.items()} == {
        GPU: ON_GPU,
        V4: PLAIN,
        "portable": PLAIN,
    }
    assert facts[V4].memory_bytes == 8 * 10**9
    assert [found.classes for found in fleet.nodes] == [(GPU, V4, "portable"), (V4, "portable")]
    assert notes == []


def test_node_with_a_broken_gpu_serves_cpus(tmp_path: Path) -> None:
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", GPU, V4, num_gpus=1), node("c", GPU, V4)]
    fleet, notes = fleet_of(tmp_path, Answers(nodes, broken=["b"]))
    assert [found.classes for found in fleet.nodes] == [
        (GPU, V4, "portable"),
        (V4, "portable"),
        (V4, "portable"),
    ]
    assert notes == [
        f"node b is not used for {GPU}: RuntimeError: no driver",
        f"node c is not used for {GPU}: Ray has no GPU there; start it with --num-gpus",
    ]
    assert fleet.facts()[GPU].toolchain == ON_GPU


def test_busy_gpu_delays_only_gpu_campaigns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 0.1)
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", GPU, V4, num_gpus=1)]
    fleet, notes = fleet_of(tmp_path, Answers(nodes, held=["a"]))
    assert [found.node_id for found in fleet.nodes] == ["b"], "a is used once it answers"
    assert notes == [
        f"starting without node a, which serves {GPU}, {V4}, portable: its cores or GPUs are in"
        " use; it is used once it answers"
    ]
    fleet, _ = fleet_of(tmp_path, Answers(nodes[:1], held=["a"]), wanted=[V4])
    assert [found.classes for found in fleet.nodes] == [(V4, "portable")], (
        "its GPU is not requested"
    )


@pytest.mark.parametrize("wanted", [[GPU], ["auto"]])
def test_class_with_only_a_busy_gpu_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[str]
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.ONLY_NODE_S", 0.2)
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", V4)]
    with pytest.raises(InfrastructureError, match=f"no node for {GPU} had .*: node a, ") as caught:
        fleet_of(tmp_path, Answers(nodes, held=["a"]), wanted=wanted)
    assert caught.value.code == "CP-NO-NODE"


def test_node_is_used_once_it_sees_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Joined(Answers):
        sighted: tuple[str, ...] = ("a",)

        def problem(self, node: Node) -> str | None:
            return None if node.node_id in self.sighted else "it does not see the store"

    monkeypatch.setattr("pipeline.scheduling.fleet.REFRESH_S", 0.0)
    monkeypatch.setattr("pipeline.scheduling.fleet.AGAIN_S", 0.0)
    cluster = Joined([node("a", V4)])
    notes = []
    cluster.joined = True
    shared = SharedFiles(store=tmp_path, files=tmp_path)
    fleet = Fleet(cluster, lambda event: notes.append(event.text), shared, wait_s=None)
    with fleet.assembled([V4]):
        cluster._nodes.append(node("b", V4))
        for _ in range(3):
            fleet.tick()
        assert notes == ["node b is not used: it does not see the store; checked again every 0 s"]
        assert [found.node_id for found in fleet.nodes] == ["a"]
        cluster.sighted = ("a", "b")
        fleet.tick()
        assert [found.node_id for found in fleet.nodes] == ["a", "b"]
    assert notes[1:] == [f"node b joined, for {V4}, portable"]


@pytest.mark.parametrize(
    ("sizes", "before", "num_threads"),
    [([4, 8], None, 4), ([8], None, 8), ([8], 4, 4), ([4, 6], 8, 4)],
    ids=["smallest node", "new campaign", "continued campaign", "no node has as many"],
)
def test_threads_of_a_class(
    tmp_path: Path, sizes: list[int], before: int | None, num_threads: int
) -> None:
    nodes = [node(f"n{size}", V4, num_cpus=size) for size in sizes]
    known = {}
    if before is not None:
        known = dict.fromkeys((V4, "portable"), ClassFacts(num_threads=before, toolchain=PLAIN))
    fleet, _ = fleet_of(tmp_path, Answers(nodes), known)
    assert (fleet.facts()[V4].num_threads, fleet.facts()[V4].is_best) == (num_threads, True)


def test_continued_campaign_keeps_its_toolchain(tmp_path: Path) -> None:
    nodes = [node(name, V4) for name in "abc"]
    before = dict.fromkeys(
        (V4, "portable"), ClassFacts(num_threads=4, toolchain={"driver": None, "torch": "2.13.0"})
    )
    fleet, _ = fleet_of(tmp_path, Answers(nodes, newer=["a", "b"]), before)
    assert fleet.facts()[V4].toolchain == PLAIN
    assert [found.node_id for found in fleet.nodes] == ["c"]
    fleet, _ = fleet_of(tmp_path, Answers(nodes, newer=["a", "b", "c"]), before)
    assert fleet.facts()[V4].toolchain == NEWER


class Dying(Answers):
    """A cluster on which no check succeeds."""

    lost = False

    def start(self, *args: Any, **named: Any) -> Handle:
        handle = super().start(*args, **named)
        self._ended = [Done(handle=handle, failure="the check failed", lost=self.lost)]
        return handle


@pytest.mark.parametrize(("lost", "code"), [(True, "CP-RAY"), (False, "CP-INFRASTRUCTURE")])
def test_checks_lost_on_all_nodes_are_rays(tmp_path: Path, lost: bool, code: str) -> None:
    cluster = Dying([node("a", V4)])
    cluster.lost = lost
    shared = SharedFiles(store=tmp_path, files=tmp_path)
    with pytest.raises(InfrastructureError) as raised:
        Fleet(cluster, lambda _: None, shared, wait_s=None).assembled({V4}).__enter__()
    assert raised.value.code == code


def test_portable_has_the_toolchain_of_the_drivers_kind(tmp_path: Path) -> None:
    """Also if more nodes are of another architecture."""
    arm = replace(node("b"), machine="another")
    nodes = [node("a", V4), arm, replace(arm, node_id="c")]
    fleet, _ = fleet_of(tmp_path, Answers(nodes, newer=["b", "c"]), wanted=("portable",))
    assert fleet.facts()["portable"].toolchain == PLAIN
