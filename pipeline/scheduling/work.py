"""Tasks of the executor, and how their failures are described."""

from __future__ import annotations

from dataclasses import dataclass, field

from freezer.errors import ColdpressError, IntegrityError
from pipeline.cluster.nodes import Done, Node
from pipeline.failures.classify import CODES, NODE_MEMORY
from pipeline.failures.policy import final_sentence
from pipeline.planning.item import Item
from pipeline.planning.memory_estimate import Demand, corrected
from pipeline.worker.requests import BuildResult, JudgeResult


@dataclass(kw_only=True)
class ItemProgress:
    """Where one item stands.

    Attributes:
        estimate: of its memory; of a model that is fetched, known when it is; no less than what its builds were seen to use.
        results: of its builds, by recipe.
        damages: the kinds of failures that candidates were built again for, which were damaged between their build and the judge.
    """

    item: Item
    index: int
    estimate: Demand
    results: dict[str, BuildResult] = field(default_factory=dict)
    damages: list[str] = field(default_factory=list)

    @property
    def built(self) -> bool:
        """Whether every build has ended."""
        return len(self.results) == len(self.item.builds)


@dataclass(kw_only=True)
class Task:
    """A build or judge under way or waiting; see `places.Work`.

    Attributes:
        recipe: None of a judge.
        node: where it was last started.
        failures: the kinds of its failures so far, as pipeline/failures/policy.py names them.
        avoid: ids of nodes to leave out while others serve the class.
        memory_bytes: to keep free for it; more than any node has means all of the largest. None: as its entry says.
    """

    progress: ItemProgress
    recipe: str | None
    node: Node | None = None
    failures: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    memory_bytes: int | None = None

    @property
    def device_class(self) -> str:
        """The device class of the item."""
        return self.progress.item.device_class

    @property
    def least_cpus(self) -> int:
        """A judge needs a core for each thread; a build makes do with one."""
        return 1 if self.recipe else self.judge_cpus

    @property
    def judge_cpus(self) -> int:
        """The CPUs that a judge of the item needs."""
        return max(self.progress.item.num_threads, *self.progress.item.further_threads, 1)

    @property
    def index(self) -> int:
        """The place of the item in the plan."""
        return self.progress.index

    @property
    def demand(self) -> Demand:
        """The memory to ask a node for."""
        estimate = self.progress.estimate
        return estimate if self.memory_bytes is None else corrected(estimate, self.memory_bytes)

    @property
    def what(self) -> str:
        """The task as it is shown."""
        return task_label(self.progress.item, self.recipe)


def task_label(item: Item, recipe: str | None) -> str:
    """`model class recipe`, as people are shown a build; of a judge without a recipe."""
    return " ".join(word for word in (item.entry.name, item.device_class, recipe) if word)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFailure:
    """A task that failed, whoever says so: Ray, or the task itself of its child.

    Attributes:
        kind: of the policy.
        failure, code, message: of the outcome, if it is final.
        node_id: where it was, if that is known.
        peak_bytes, tried_bytes: as in isolate's End.
    """

    kind: str
    failure: str
    code: str
    message: str
    node_id: str | None = None
    peak_bytes: int = 0
    tried_bytes: int | None = None


def failure_in(done: Done, node: Node | None) -> TaskFailure | None:
    """What went wrong with a task; None where nothing did."""
    node_id = node.node_id if node else None
    if done.failure is not None:
        failure = {"node-memory": "memory", "disk": "disk"}.get(done.kind, "infrastructure")
        code = NODE_MEMORY if failure == "memory" else CODES[failure]
        return TaskFailure(kind=done.kind, failure=failure, code=code, message=done.failure, node_id=node_id)
    result: BuildResult | JudgeResult = done.value
    if result.failure is None:
        return None
    is_damage = isinstance(result, JudgeResult) and result.code == IntegrityError.code
    return TaskFailure(
        kind="damage" if is_damage else result.failure,
        failure=result.failure,
        code=result.code or ColdpressError.code,
        message=result.message if isinstance(result, BuildResult) else result.reason,
        node_id=node_id,
        peak_bytes=result.peak_bytes,
        tried_bytes=result.tried_bytes,
    )


def final_message(failed: TaskFailure, task: Task) -> str:
    """The message of a failure that is not tried again."""
    more = final_sentence(failed.kind, failed.code, len(task.failures))
    return f"{failed.message}; {more}" if more else failed.message
