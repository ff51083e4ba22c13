"""Which task a node gets next: by class, memory and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipeline.cluster import Node
from pipeline.planning import Demand
from pipeline.planning.keys import make_key
from pipeline.records import BuildResult
from pipeline.scheduling.queue import (
    LOOK_AHEAD,
    Queue,
    Slot,
    Task,
    fits,
)
from tests.support.one_node import waiting
from tests.support.steps import HERE

V3 = "cpu-x86-64-v3"
V4 = "cpu-x86-64-v4"
GPU = "cuda-sm90"
ANY = "portable"


def node(
    name: str, *classes: str, num_cpus: int = 2, num_gpus: int = 0, memory_bytes: int | None = 100
) -> Node:
    return Node(
        node_id=name,
        num_cpus=num_cpus,
        classes=(*classes, ANY),
        num_gpus=num_gpus,
        memory_bytes=memory_bytes,
    )


BIG = node("big", V4, V3, num_cpus=4)
SMALL = node("small", V3)
NODES = (BIG, SMALL)


def queue_of(*tasks: Task) -> Queue:
    queue = Queue()
    for task in tasks:
        queue.add(task)
    return queue


def taken(queue: Queue, slot: Slot, nodes: tuple[Node, ...] = NODES) -> list[str]:
    """The classes of all that a node takes, in order."""
    found = []
    while (task := queue.take(slot, nodes)) is not None:
        slot.begin(task)
        found.append(task.device_class)
    return found


def test_node_takes_rare_classes_first() -> None:
    queue = queue_of(waiting(ANY), waiting(V3), waiting(V4), waiting(V4))
    assert taken(queue, Slot(node=BIG)) == [V4, V4, V3, ANY]
    assert taken(queue_of(waiting(ANY), waiting(V3), waiting(V4)), Slot(node=SMALL)) == [V3, ANY], (
        "v4 is beyond it"
    )


def build(recipe: str, **parts: bool) -> Task:
    """A build for V3 with a key of these parts."""
    task = waiting(V3, recipe=recipe)
    item = replace(task.item, builds={recipe: make_key(parts)})
    task.progress.state = replace(task.progress.state, item=item)
    return task


def test_engines_run_on_the_cpu_of_their_class() -> None:
    better = replace(BIG, lesser=frozenset((V3,)))
    nodes = (better, SMALL)
    engine, other = build("onnxruntime"), build("inductor-frozen")
    queue = queue_of(engine, other)
    assert (queue.num_for(better, nodes), queue.num_for(SMALL, nodes)) == (2, 2)
    assert queue.take(Slot(node=better), nodes) is other
    assert (queue.num_for(better, nodes), queue.num_for(SMALL, nodes)) == (0, 1)
    judge = Task(progress=engine.progress, recipe=None)
    built = {"onnxruntime": BuildResult(key="", recipe="onnxruntime")}
    judge.progress.state = replace(judge.progress.state, results=built)
    assert [node for node in nodes if fits(judge, node, nodes)] == [SMALL]
    refused = build("openvino", better_cpu=True)
    assert fits(refused, better, (better,)), "the plan has found no other node"


def test_large_tasks_do_not_block_small_ones() -> None:
    large = [waiting(V3, demand=Demand(asked=500, least=500)) for _ in range(LOOK_AHEAD - 1)]
    little = waiting(V3)
    roomy = node("roomy", V3, memory_bytes=1000)
    queue = queue_of(*large, little)
    assert queue.take(Slot(node=SMALL), (SMALL, roomy)) is little
    assert queue.take(Slot(node=roomy), (SMALL, roomy)) is large[0]
    assert len(queue) == LOOK_AHEAD - 2


def test_judge_needs_a_core_per_thread() -> None:
    wide = waiting(V3, judge_cpus=4)
    assert queue_of(wide).take(Slot(node=SMALL), NODES) is None
    assert queue_of(wide).take(Slot(node=BIG), NODES) is wide


def test_gpu_builds_are_bounded_by_gpus() -> None:
    with_gpu = node("gpu", GPU, V3, num_cpus=8, num_gpus=1)
    queue = queue_of(*(waiting(name, recipe="portable") for name in (GPU,) * 5 + (V3,) * 3))
    slot = Slot(node=with_gpu)
    assert taken(queue, slot, (with_gpu,)) == [GPU, V3, V3, V3]
    slot.running.pop(0)
    assert taken(queue, slot, (with_gpu,)) == [GPU]
    without = node("none", GPU)
    assert queue_of(waiting(GPU)).take(Slot(node=without), (without,)) is None


GB = 10**9


@pytest.mark.parametrize(
    ("asked", "firm", "avoid", "sizes", "fitting"),
    [
        (20, True, (), {"small": 4, "large": 8}, ["large"]),
        (20, True, (), {"small": 4}, ["small"]),
        (20, False, (), {"small": 4, "large": 8}, ["small", "large"]),
        (3, True, (), {"small": 4, "large": 8}, ["small", "large"]),
        (6, True, ("large",), {"small": 4, "large": 8}, ["large"]),
        (6, True, ("large",), {"small": 4, "large": 8, "other": 8}, ["other"]),
        (6, False, ("large",), {"small": 4, "large": 8}, ["small"]),
    ],
    ids=[
        "a retry for memory takes the largest",
        "which may be too small",
        "an estimate fits anywhere",
        "enough memory",
        "memory counts more than avoided nodes",
        "unless another has it",
        "avoided",
    ],
)
def test_nodes_that_fit_by_memory(
    asked: int, firm: bool, avoid: tuple[str, ...], sizes: Mapping[str, int], fitting: list[str]
) -> None:
    nodes = [node(name, V3, memory_bytes=size * GB) for name, size in sizes.items()]
    task = waiting(V3, avoid=avoid, demand=Demand(asked=asked * GB, least=0, firm=firm))
    assert [node.node_id for node in nodes if fits(task, node, nodes)] == fitting


def test_judges_prefer_real_cpus() -> None:
    emulated = replace(node("emulated", V3), emulated=True)
    judge, build = waiting(V3), waiting(V3, recipe="inductor-frozen")
    assert fits(judge, emulated, [emulated])
    assert not fits(judge, emulated, [emulated, SMALL])
    assert fits(build, emulated, [emulated, SMALL])


def test_portable_prefers_nodes_like_the_drivers() -> None:
    here = node("here", HERE)
    other = replace(here, node_id="other", machine="another")
    emulated = replace(here, node_id="emulated", emulated=True)
    task = waiting(ANY, recipe="portable")
    for node_ in (other, emulated):
        assert fits(task, node_, [node_])
        assert not fits(task, node_, [node_, here])
    assert fits(task, here, [other, emulated, here])


def test_portable_goes_with_the_class_of_its_model() -> None:
    here = node("here", V3, num_cpus=8)
    slot = Slot(node=here)
    portable, build, judge = (
        waiting(ANY, recipe="portable"),
        waiting(V3, recipe="inductor-frozen"),
        waiting(V3),
    )
    queue = queue_of(portable)
    assert queue.take_portable(build, Slot(node=replace(here, classes=(V3,))), (here,)) == []
    assert queue.take_portable(build, slot, (here,)) == [portable]
    assert queue.take_portable(judge, slot, (here,)) == [], "it was taken"
    threads = waiting(ANY, judge_cpus=4)
    assert queue_of(threads).take_portable(judge, slot, (here,)) == [], "it has other threads"
