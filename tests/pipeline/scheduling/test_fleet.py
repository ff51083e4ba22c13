"""Which nodes a campaign uses, and for which classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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


class Answers(NoRay):
    """A cluster whose nodes answer a probe at once, but those named as

    `broken`: have no driver that works; `newer`: have a newer torch; `blind`: do not see the store;
    `held`: do not answer, with a class behind a colon not for that class alone.
    """

    def __init__(self, nodes: Sequence[Node], **named: Sequence[str]) -> None:
        super().__init__()
        self.all, self._threads = list(nodes), dict[Handle, int]()
        self.named = {**dict.fromkeys(("broken", "newer", "blind", "held"), ()), **named}

    def nodes(self) -> list[Node]:
        return self.all

    def start(  # type: ignore[override]
        self, _: Callable[..., Any], *args: Any, class_name: str, node: Node, **__: Any
    ) -> Handle:
        handle = (node.node_id, class_name)
        self._threads[handle] = node.num_cpus
        return handle

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        held = self.named["held"]
        free = [(a, b) for a, b in handles if a not in held and f"{a}:{b}" not in held]
        return [self.answer(*handle) for handle in free]

    def answer(self, name: str, class_name: str) -> Done:
        handle = (name, class_name)
        toolchain = NEWER if name in self.named["newer"] else PLAIN
        if class_name == GPU:
            toolchain = ON_GPU
            if name in self.named["broken"]:
                return Done(handle=handle, failure="RuntimeError: no driver")
        facts = ClassFacts(num_threads=self._threads[handle], toolchain=toolchain, memory_bytes=8)
        problem = "it does not see the store" if name in self.named["blind"] else None
        return Done(handle=handle, value=Inspected(facts=facts, problem=problem))


def node(name: str, *classes: str, num_cpus: int = 4, num_gpus: int = 0) -> Node:
    return Node(node_id=name, num_cpus=num_cpus, classes=(*classes, "portable"), num_gpus=num_gpus)


FleetOf = Callable[..., tuple[Fleet, list[str]]]


@pytest.fixture
def fleet_of(tmp_path: Path) -> Iterator[FleetOf]:
    """Assembles a fleet, until the end of the test; returns it, and what it says."""
    shared = SharedFiles(store=tmp_path, files=tmp_path)
    with ExitStack() as held:

        def assembled(
            cluster: Answers,
            before: Mapping[str, ClassFacts] | None = None,
            wanted: Sequence[str] = ("auto",),
        ) -> tuple[Fleet, list[str]]:
            notes: list[str] = []

            def show(event: Event) -> None:
                notes.append(event.text)

            fleet = Fleet(cluster, show, shared, wait_s=None, before=before)
            held.enter_context(fleet.assembled(wanted))
            return fleet, notes

        yield assembled


def test_gpus_and_cpus_report_their_toolchains(fleet_of: FleetOf) -> None:
    """A node whose GPU is broken, or unknown to Ray, serves CPUs."""
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", GPU, V4, num_gpus=1), node("c", GPU, V4)]
    fleet, notes = fleet_of(Answers(nodes, broken=["b"]))
    facts = fleet.facts()
    assert {name: found.toolchain for name, found in facts.items()} == {
        GPU: ON_GPU,
        V4: PLAIN,
        "portable": PLAIN,
    }
    assert facts[V4].memory_bytes == 8
    of_cpus = (V4, "portable")
    assert [found.classes for found in fleet.nodes] == [(GPU, *of_cpus), of_cpus, of_cpus]
    assert [GPU in note for note in notes] == [True, True]


def test_busy_gpu_delays_only_gpu_campaigns(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 0.1)
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", GPU, V4, num_gpus=1)]
    fleet, _ = fleet_of(Answers(nodes, held=[f"a:{GPU}"]))
    assert [found.node_id for found in fleet.nodes] == ["b"]
    fleet, _ = fleet_of(Answers(nodes[:1], held=[f"a:{GPU}"]), wanted=[V4])
    assert [found.classes for found in fleet.nodes] == [(V4, "portable")], (
        "its GPU is not requested"
    )


@pytest.mark.parametrize("wanted", [[GPU], ["auto"]])
@pytest.mark.parametrize("held", ["a", f"a:{GPU}"])
def test_class_with_only_a_busy_node_fails(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, wanted: list[str], held: str
) -> None:
    monkeypatch.setattr("pipeline.scheduling.node_check.ONLY_NODE_S", 0.2)
    nodes = [node("a", GPU, V4, num_gpus=1), node("b", V4)]
    with pytest.raises(InfrastructureError) as caught:
        fleet_of(Answers(nodes, held=[held]), wanted=wanted)
    assert caught.value.code == "CP-NO-NODE"


@pytest.mark.parametrize("late", ["held", "blind"])
def test_node_is_used_once_it_is_ready(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Others had its cores, or it did not see the store."""
    monkeypatch.setattr("pipeline.scheduling.node_check.LATE_S", 0.1)
    monkeypatch.setattr("pipeline.scheduling.fleet.REFRESH_S", 0.0)
    monkeypatch.setattr("pipeline.scheduling.fleet.AGAIN_S", 0.0)
    nodes = [node("a", V4), node("b", V4)]
    cluster = Answers(nodes[: 2 if late == "held" else 1], **{late: ["b"]})
    cluster.joined = True
    fleet, notes = fleet_of(cluster, wanted=[V4])
    cluster.all = nodes
    for _ in range(3):
        fleet.tick()
    assert [found.node_id for found in fleet.nodes] == ["a"]
    assert len(notes) == 1, "said once"
    cluster.named[late] = ()
    fleet.tick()
    assert [found.node_id for found in fleet.nodes] == ["a", "b"]
    assert notes[1:] == [f"node b joined, for {V4}, portable"]


@pytest.mark.parametrize(
    ("sizes", "before", "num_threads"),
    [([4, 8], None, 4), ([8], None, 8), ([8], 4, 4), ([4, 6], 8, 4)],
    ids=["smallest node", "new campaign", "continued campaign", "no node has as many"],
)
def test_threads_of_a_class(
    fleet_of: FleetOf, sizes: list[int], before: int | None, num_threads: int
) -> None:
    nodes = [node(f"n{size}", V4, num_cpus=size) for size in sizes]
    known = {}
    if before is not None:
        known = dict.fromkeys((V4, "portable"), ClassFacts(num_threads=before, toolchain=PLAIN))
    fleet, _ = fleet_of(Answers(nodes), known)
    assert (fleet.facts()[V4].num_threads, fleet.facts()[V4].is_best) == (num_threads, True)


def test_continued_campaign_keeps_its_toolchain(fleet_of: FleetOf) -> None:
    nodes = [node(name, V4) for name in "abc"]
    facts = ClassFacts(num_threads=4, toolchain={"driver": None, "torch": "2.13.0"})
    before = dict.fromkeys((V4, "portable"), facts)
    fleet, _ = fleet_of(Answers(nodes, newer=["a", "b"]), before)
    assert fleet.facts()[V4].toolchain == PLAIN
    assert [found.node_id for found in fleet.nodes] == ["c"]
    fleet, _ = fleet_of(Answers(nodes, newer=["a", "b", "c"]), before)
    assert fleet.facts()[V4].toolchain == NEWER


@pytest.mark.parametrize(("lost", "code"), [(True, "CP-RAY"), (False, "CP-INFRASTRUCTURE")])
def test_checks_lost_on_all_nodes_are_rays(fleet_of: FleetOf, lost: bool, code: str) -> None:
    class Dying(Answers):
        def answer(self, *handle: str) -> Done:
            return Done(handle=handle, failure="the check failed", lost=lost)

    with pytest.raises(InfrastructureError) as raised:
        fleet_of(Dying([node("a", V4)]), wanted=[V4])
    assert raised.value.code == code


def test_portable_has_the_toolchain_of_the_drivers_kind(fleet_of: FleetOf) -> None:
    """Also if more nodes are of another architecture."""
    arm = replace(node("b"), machine="another")
    nodes = [node("a", V4), arm, replace(arm, node_id="c")]
    fleet, _ = fleet_of(Answers(nodes, newer=["b", "c"]), wanted=("portable",))
    assert fleet.facts()["portable"].toolchain == PLAIN
