"""A Ray cluster: its nodes, their device classes, and tasks on them. The driver retries tasks;
Ray's retries are off.

A node has one label for each class that it serves: `coldpress.dev/cpu-x86-64-v3=true`. A task's
worker gets its class's instruction-set limits as environment variables before torch is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from freezer.codec import frozen

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freezer.errors import first_line
from freezer.hardware import (
    DEVICE_CLASSES,
    PORTABLE,
    device_class,
    lesser_classes,
    this_host,
)
from pipeline.cluster.head_monitor import CHECK_INTERVAL_S, Head
from pipeline.failures import kind_of_ray
from pipeline.records import EMULATED, LABEL


@frozen
class Node:
    """A live node of the cluster and the device classes that it serves, including `portable`.

    Attributes:
        memory_bytes: memory that Ray schedules on the node, or None.
        labelled: whether the node has any Coldpress label.
        lesser: those of its classes whose CPUs lack instructions that it has.
        machine: architecture of its CPU, as in `uname -m`; empty if no label tells it.
        emulated: whether its CPU is emulated.
    """

    node_id: str
    num_cpus: int
    classes: tuple[str, ...]
    num_gpus: int = 0
    memory_bytes: int | None = None
    labelled: bool = True
    lesser: frozenset[str] = frozenset()
    machine: str = ""
    emulated: bool = False

    @property
    def is_like_the_driver(self) -> bool:
        """Whether its CPU is real, and of the driver's architecture if that is known."""
        return not self.emulated and self.machine in ("", this_host().machine)

    def __str__(self) -> str:
        return f"node {self.node_id[:12]}"


def classes_of(nodes: Collection[Node]) -> tuple[str, ...]:
    """Return the classes that the nodes serve, in the order of DEVICE_CLASSES."""
    served = {name for node in nodes for name in node.classes}
    return tuple(name for name in DEVICE_CLASSES if name in served)


Handle = Any
"""A running task: Ray's reference to its result."""


@frozen
class Done:
    """Result of a task: its value, or the infrastructure's failure in one sentence.

    Attributes:
        lost: whether its worker or node was lost.
        kind: kind of the failure, as in pipeline/failures.py.
    """

    handle: Handle
    value: Any = None
    failure: str | None = None
    lost: bool = False
    kind: str = "infrastructure"


@frozen
class Ask:
    """Resources for one waiting task, as requested from an autoscaler; no memory if any node has
    enough.
    """

    device_class: str
    num_cpus: int = 1
    memory_bytes: int | None = None


class Cluster:
    """A Ray cluster that this process drives; created by `connect`.

    Attributes:
        joined: whether the cluster existed before and may be shared; False for a local Ray.
        head: monitor of the head. Ray is not called while the head is silent: it would wait, and
            then kill this process.
    """

    def __init__(self, *, joined: bool, head: Head) -> None:
        self.joined = joined
        self.head = head
        self._nodes: list[Node] = []
        self._asked: dict[Ask, list[Handle]] = {}

    def nodes(self) -> list[Node]:
        """Return the live nodes with CPUs that are not being drained; while the head is silent, the
        last known ones.

        Raises:
            InfrastructureError: the head stays silent.
        """
        if self.head.answers():
            alive = [
                _node(node)
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
            ]
            draining = self._draining()
            self._nodes = [node for node in alive if node.node_id not in draining]
        return list(self._nodes)

    def _draining(self) -> Collection[str]:
        """Return the ids of nodes that end soon: `ray drain-node` or the autoscaler gives them no
        new tasks.
        """
        errors = (ImportError, AttributeError, RuntimeError, OSError, ray.exceptions.RayError)
        with suppress(*errors):
            from ray._private import state  # internal to Ray

            return frozenset(state.state.get_draining_nodes())
        return frozenset()

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask an autoscaler for nodes, with tasks that do nothing and wait for a node.

        Ray's `request_resources` takes label selectors too, but is worse here: a cluster has a
        single request, which every campaign would overwrite, and which outlives its driver and
        keeps the nodes running. Tasks end with their driver.

        Args:
            wanted: count of each, instead of the previous ones. All tasks of an unwanted kind are
                cancelled; single ones are not, since Ray requests nodes as long as any task of a
                kind waits.
        """
        waiting = [handle for handles in self._asked.values() for handle in handles]
        ended = {done.handle for done in self.wait(waiting, timeout_s=0)} if waiting else set()
        for ask in {*wanted, *self._asked}:
            pending = [handle for handle in self._asked.pop(ask, []) if handle not in ended]
            count = wanted.get(ask, 0)
            if not count:
                self.cancel(pending, grace_s=1)
                continue
            self._asked[ask] = pending
            for _ in range(count - len(pending)):
                pending.append(
                    self.start(
                        _nothing,
                        name=f"ask {ask.device_class}",
                        class_name=ask.device_class,
                        num_cpus=ask.num_cpus,
                        memory_bytes=ask.memory_bytes,
                    )
                )

    def start(
        self,
        function: Callable[..., object],
        *args: object,
        name: str,
        class_name: str,
        node: Node | None = None,
        num_cpus: int = 1,
        memory_bytes: int | None = None,
    ) -> Handle:
        """Start a task on some cores, and on one GPU for a CUDA class.

        Args:
            function: function that nodes can import.
            args: arguments that can be pickled.
            name: name shown by Ray.
            class_name: device class whose limits apply.
            node: node to run on; None means any node of the class. The task dies with its node.
            num_cpus: cores to reserve. A short task without one also runs beside a judge.
            memory_bytes: memory to reserve.
        """
        used = device_class(class_name)
        options: dict[str, object] = {"num_cpus": num_cpus}
        if used.kind == "cuda":
            options["num_gpus"] = 1
        if memory_bytes is not None:
            options["memory"] = memory_bytes
        if node is not None:  # on a dead node, it fails; by a label, it would wait
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node.node_id, soft=False
            )
        elif class_name != PORTABLE:
            options["label_selector"] = {f"{LABEL}{class_name}": "true"}
        while not self.head.answers():
            time.sleep(CHECK_INTERVAL_S)
        environ = {**used.limits, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        remote = _remote(function).options(
            max_retries=0, name=name, runtime_env={"env_vars": environ}, **options
        )
        return remote.remote(*args)

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        """Wait until a task ends, at most `timeout_s` seconds; return all that have ended."""
        ended, others = ray.wait(list(handles), num_returns=1, timeout=timeout_s)
        if ended and others:
            ended += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [self._done(handle) for handle in ended]

    def _done(self, handle: Handle) -> Done:
        try:
            return Done(handle=handle, value=ray.get(handle))
        except ray.exceptions.RayError as error:
            cause, text = None, first_line(error)
            if isinstance(error, ray.exceptions.RayTaskError):
                cause, text = error.cause, str(error.cause)
            return Done(
                handle=handle,
                failure=f"{type(cause or error).__name__}: {text}",
                kind=kind_of_ray(error, cause),
                lost=cause is None,
            )

    def cancel(self, handles: Sequence[Handle], *, grace_s: float = 5.0) -> None:
        """Interrupt tasks, which ends their child processes; kill those that run longer than
        `grace_s`.
        """
        if not handles or self.head.is_silent:
            return
        for handle in handles:
            ray.cancel(handle, force=False)
        _, alive = ray.wait(list(handles), num_returns=len(handles), timeout=grace_s)
        for handle in alive:
            with suppress(ValueError, ray.exceptions.RayError):
                ray.cancel(handle, force=True)


@lru_cache(maxsize=16)
def _remote(function: Callable[..., object]) -> Any:
    """Return a remote function, created once: Ray sends the code of each to the cluster."""
    return ray.remote(function)


def _node(row: Mapping[str, Any]) -> Node:
    """Return a node from a row of `ray.nodes`."""
    labels = row.get("Labels", {})
    resources = row["Resources"]
    served = [name for name in DEVICE_CLASSES if labels.get(f"{LABEL}{name}") == "true"]
    lesser = lesser_classes(served)
    # Nothing makes oneDNN pack weights for a lesser Arm class (`DeviceClass.limits`).
    other = {name for name in lesser if not device_class(name).limits}
    classes = [name for name in served if name not in {PORTABLE, *other}]
    return Node(
        node_id=row["NodeID"],
        num_cpus=int(resources["CPU"]),
        classes=(*classes, PORTABLE),
        num_gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources["memory"]) if "memory" in resources else None,
        labelled=any(name.startswith(LABEL) for name in labels),
        lesser=lesser - other,
        machine=max((device_class(name).machine for name in served), default=""),
        emulated=labels.get(EMULATED) == "true",
    )


def _nothing() -> None:
    """The task that waits for a node."""
