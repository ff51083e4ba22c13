"""A fleet of one node without Ray, and a task that waits for a node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from freezer.freezing.sources import Source
from freezer.spec import Limits, SamplingPolicy
from pipeline.catalog import Entry
from pipeline.cluster import Cluster, Done, Handle, Node
from pipeline.planning import Demand, Item
from pipeline.planning.keys import make_key
from pipeline.records import Outcome
from pipeline.scheduling import Fleet, ItemState, SharedFiles
from pipeline.scheduling.item_state import Attempts
from pipeline.scheduling.queue import Progress, Task
from tests.support.steps import HERE

NODE = Node(node_id="n1", num_cpus=2, classes=(HERE, "portable"))


DEMAND = Demand(asked=2 * 10**9, least=0)


def waiting(
    device_class: str,
    *,
    index: int = 0,
    recipe: str | None = None,
    judge_cpus: int = 1,
    avoid: Collection[str] = (),
    demand: Demand = DEMAND,
) -> Task:
    """A build, or a judge if `recipe` is None, that waits for a node."""
    attempts = {recipe: Attempts(avoid=frozenset(avoid))}
    state = ItemState(
        item=item_of(device_class, num_threads=judge_cpus), estimate=demand, attempts=attempts
    )
    return Task(progress=Progress(state=state, index=index), recipe=recipe)


def item_of(
    device_class: str,
    recipes: Sequence[str] = (),
    *,
    num_threads: int = 2,
    missed: tuple[str, ...] = (),
    before: Outcome | None = None,
) -> Item:
    """An item of the model `m`."""
    model = Entry(
        name="m",
        source=Source(kind="python", location="mod:make"),
        spec=None,
        samples=None,
        task_metric=None,
        limits=Limits(),
        device_classes=("auto",),
        recipes=("auto",),
        files=(),
        search_path=(),
    )
    return Item(
        entry=model,
        device_class=device_class,
        threads=(num_threads,),
        source=make_key({}),
        builds={recipe: make_key({"recipe": recipe}) for recipe in recipes},
        judge=make_key({"judge": device_class}),
        policy=SamplingPolicy(),
        missed=missed,
        before=before,
    )


class NoRay(Cluster):
    """Base of clusters that run tasks without Ray; the driver is on a machine of its own."""

    def __init__(self) -> None:
        self.joined = False


class InProcess(NoRay):
    """A cluster in this process: `start` runs the task, unless nodes are lost."""

    def __init__(self, *, lost: bool = False) -> None:
        super().__init__()
        self.nodes_used: list[Node | None] = []
        self._ended: list[Done] = []
        self._lost = lost

    def start(
        self, function: Callable[..., Any], *args: Any, node: Node | None = None, **_: Any
    ) -> Handle:
        handle = len(self.nodes_used)
        self.nodes_used.append(node)
        done = Done(handle=handle, failure="NodeDiedError: gone", lost=True)
        if not self._lost:
            done = Done(handle=handle, value=function(*args))
        self._ended.append(done)
        return handle

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, handles: Sequence[Handle], **_: Any) -> None:
        """No task is ever running."""


class OneNode(Fleet):
    """Nodes that need no check, and stay; one by default."""

    def __init__(self, cluster: Cluster, store: Path, *nodes: Node) -> None:
        shared = SharedFiles(store=store, files=store)
        super().__init__(cluster, lambda _: None, shared, wait_s=None)
        self.have(*(nodes or (NODE,)))

    def have(self, *nodes: Node) -> None:
        self._used = {node.node_id: node for node in nodes}

    def tick(self) -> None:
        """Nothing changes."""
