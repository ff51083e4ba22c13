"""Tasks that the executor queues and runs, and how a task of Ray ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from freezer.errors import IntegrityError
from pipeline.cluster.nodes import Done, Node
from pipeline.failures.classify import CODES, NODE_MEMORY
from pipeline.planning.memory_estimate import Demand
from pipeline.planning.plan import Item
from pipeline.records.outcome import Failure
from pipeline.scheduling.item_state import ItemState, TaskFailure
from pipeline.worker.requests import BuildResult, JudgeResult


@dataclass(kw_only=True, eq=False)
class Progress:
    """The current state of an item; `index` is its position in the plan."""

    index: int
    state: ItemState

    @property
    def item(self) -> Item:
        """The item."""
        return self.state.item


@dataclass(kw_only=True, eq=False)
class Task:
    """A queued or running build, or a judge if `recipe` is None; see `queue.Work`."""

    progress: Progress
    recipe: str | None
    node: Node | None = None

    @property
    def device_class(self) -> str:
        """The device class of the item."""
        return self.progress.item.device_class

    @property
    def least_cpus(self) -> int:
        """CPUs that the task needs: one for a build, one for each thread for a judge."""
        return 1 if self.recipe else self.judge_cpus

    @property
    def judge_cpus(self) -> int:
        """CPUs that the judge of the item needs."""
        return max(self.progress.item.num_threads, *self.progress.item.further_threads, 1)

    @property
    def index(self) -> int:
        """Position of the item in the plan."""
        return self.progress.index

    @property
    def avoid(self) -> Collection[str]:
        """Ids of nodes where it failed."""
        return self.progress.state.attempts_of(self.recipe).avoid

    @property
    def demand(self) -> Demand:
        """Memory to request from a node."""
        return self.progress.state.demand_of(self.recipe)

    @property
    def label(self) -> str:
        """`model class recipe`; a judge has no recipe."""
        return self.progress.item.label(self.recipe)


def failure_in(done: Done, node: Node | None) -> TaskFailure | None:
    """Return why a task failed; None if it succeeded."""
    node_id = node.node_id if node else None
    if done.failure is not None:
        kind = {"node-memory": "memory", "disk": "disk"}.get(done.kind, "infrastructure")
        code = NODE_MEMORY if kind == "memory" else CODES[kind]
        return TaskFailure(kind=done.kind, failure=Failure(kind=kind, code=code, message=done.failure), node_id=node_id)
    result: BuildResult | JudgeResult = done.value
    if result.failure is None:
        return None
    is_damage = isinstance(result, JudgeResult) and result.failure.code == IntegrityError.code
    kind = "damage" if is_damage else result.failure.kind
    return TaskFailure(kind=kind, failure=result.failure, node_id=node_id, peak_bytes=result.peak_bytes)
