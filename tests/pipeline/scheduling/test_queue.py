"""Which task a node gets next: by class, memory, load and turn."""

from __future__ import annotations

from itertools import pairwise

from pipeline.cluster import Node
from pipeline.planning import Demand
from pipeline.scheduling.queue import (
    JUDGE_BATCH,
    LOOK_AHEAD,
    WINDOW,
    Queue,
    Slot,
    Task,
    ask_bytes,
    begins_turn,
    ends_turn,
    fits,
    missing,
)
from tests.support.one_node import waiting

V3, V4, GPU, ANY = "cpu-x86-64-v3", "cpu-x86-64-v4", "cuda-sm90", "portable"


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


BIG, SMALL = node("big", V4, V3, num_cpus=4), node("small", V3)
NODES = (BIG, SMALL)


def queue_of(*tasks: Task) -> Queue:
    queue = Queue()
    for task in tasks:
        queue.append(task)
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


def test_node_changes_class_after_a_window() -> None:
    alike = (node("a", V3), node("b", V3))
    queue = queue_of(*(waiting(name, index=i) for i in range(3 * WINDOW) for name in (V3, ANY)))
    slot = Slot(node=alike[0], last_class=ANY)
    order = taken(queue, slot, alike)
    assert order[:WINDOW] == [ANY] * WINDOW
    assert order[WINDOW : 3 * WINDOW].count(V3) >= WINDOW
    switches = sum(a != b for a, b in pairwise(order))
    assert switches <= 4


def test_failed_task_avoids_its_node() -> None:
    failed = waiting(V3, avoid={"big"})
    assert queue_of(failed).take(Slot(node=BIG), NODES) is None
    assert queue_of(failed).take(Slot(node=SMALL), NODES) is failed
    assert queue_of(failed).take(Slot(node=BIG), (BIG,)) is failed


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
    assert taken(queue, slot, (with_gpu,)) == [GPU, GPU, V3, V3, V3]
    slot.end(waiting(GPU, recipe="portable"))
    assert taken(queue, slot, (with_gpu,)) == [GPU]
    without = node("none", GPU)
    assert queue_of(waiting(GPU)).take(Slot(node=without), (without,)) is None


def test_last_builds_do_not_queue() -> None:
    full = Slot(node=SMALL, builds=2)
    assert full.has_room(num_waiting=100, num_cpus=6)
    assert not full.has_room(num_waiting=6, num_cpus=6), "others idle, and could take it"
    assert not Slot(node=SMALL, builds=4).has_room(num_waiting=100, num_cpus=6)


def turn(slot: Slot, *slots: Slot, ready: int, waiting: int, now: float = 0.0) -> bool:
    return begins_turn(slot, (slot, *slots), ready=ready, waiting=waiting, now=now)


def test_nodes_take_turns_to_judge() -> None:
    first, second = Slot(node=BIG), Slot(node=SMALL)
    assert not turn(first, second, ready=JUDGE_BATCH - 1, waiting=9)
    assert turn(first, second, ready=JUDGE_BATCH, waiting=9)
    first.turn = True
    assert not turn(second, first, ready=JUDGE_BATCH + 1, waiting=9), "the first takes those"
    assert turn(second, first, ready=2 * JUDGE_BATCH, waiting=9)
    assert turn(second, first, ready=1, waiting=0), "it has nothing else to do"
    assert not turn(second, first, ready=0, waiting=0)
    assert not first.has_room(num_waiting=100, num_cpus=6), (
        "nothing is built where a judge is to run"
    )


def test_turn_ends_after_a_batch() -> None:
    slot = Slot(node=BIG)
    for _ in range(JUDGE_BATCH):
        slot.begin(waiting(V4))
        assert not ends_turn(slot, ready=9, waiting=9, others=True), "a judge runs"
        slot.end(waiting(V4))
    assert ends_turn(slot, ready=9, waiting=9, others=False)
    assert ends_turn(slot, ready=9, waiting=0, others=True)
    assert not ends_turn(slot, ready=9, waiting=0, others=False)
    assert ends_turn(slot, ready=0, waiting=0, others=False)
    assert not turn(Slot(node=BIG, rests_until=5.0), ready=9, waiting=0, now=4.0), (
        "the others have had no time to notice"
    )


def test_missing_memory_names_the_largest_node() -> None:
    said = missing(
        waiting(V3, demand=Demand(asked=4 * 10**9, least=2 * 10**9)),
        [node("a", V3, memory_bytes=10**9), BIG],
    )
    assert said is not None
    assert said.startswith(
        "needs 2.0 GB of memory, but the largest node that serves cpu-x86-64-v3 has 1.0 GB; start"
    )
    assert missing(waiting(V3), NODES) is None
    assert missing(waiting(V3), [node("a", V3, memory_bytes=None)]) is None, (
        "it gives out none, and limits none"
    )
    assert missing(waiting(GPU), NODES) is None, "no node of the class is another complaint"
    assert ask_bytes(Demand(asked=500, least=90), SMALL) == 100
    assert ask_bytes(Demand(asked=50, least=9), SMALL) == 50
    assert ask_bytes(Demand(asked=50, least=9), node("a", memory_bytes=None)) is None


def test_retry_for_memory_prefers_the_largest_node() -> None:
    small, large = (
        node("small", V3, memory_bytes=4 * 10**9),
        node("large", V3, memory_bytes=8 * 10**9),
    )
    again = waiting(V3, demand=Demand(asked=20 * 10**9, least=0, firm=True))
    assert not fits(again, small, [small, large])
    assert fits(again, large, [small, large])
    assert fits(again, small, [small]), "it is the largest"
    assert fits(waiting(V3, demand=Demand(asked=20 * 10**9, least=0)), small, [small, large]), (
        "an estimate"
    )
    assert fits(
        waiting(V3, demand=Demand(asked=3 * 10**9, least=0, firm=True)), small, [small, large]
    ), "it has enough"


def test_memory_counts_more_than_avoided_nodes() -> None:
    small, large = (
        node("small", V3, memory_bytes=4 * 10**9),
        node("large", V3, memory_bytes=8 * 10**9),
    )
    again = waiting(V3, avoid={"large"}, demand=Demand(asked=6 * 10**9, least=0, firm=True))
    assert [fits(again, one, [small, large]) for one in (small, large)] == [False, True]
    other = node("other", V3, memory_bytes=8 * 10**9)
    assert [fits(again, one, [small, large, other]) for one in (small, large, other)] == [
        False,
        False,
        True,
    ]


def test_queue_returns_and_removes_tasks() -> None:
    a, b, c = waiting(V3, index=1), waiting(V3, index=2), waiting(ANY, index=3)
    queue = queue_of(a, b, c)
    assert queue.take(Slot(node=SMALL), NODES) is a
    queue.appendleft(a)
    assert queue.num_for(SMALL) == len(queue) == 3
    queue.remove([a, c])
    assert list(queue) == [b]
    assert queue.counts() == {V3: 1}
