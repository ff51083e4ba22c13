"""Check a node before it is used: whether it sees the store and the files of the catalog, and its
toolchain for each class.

A task needs a core, or a GPU for a GPU class, so it may wait for the judge of another campaign.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezer.codec import frozen
from freezer.errors import InfrastructureError
from freezer.hardware import (
    AUTO_PRECISE,
    PORTABLE,
    auto_classes,
    detect,
    lesser_classes,
)
from freezer.spec import Limits
from pipeline.catalog import Entry
from pipeline.cluster import Cluster, Done, Handle, Node
from pipeline.records import ClassFacts, FleetFacts, Note
from pipeline.scheduling.queue import takes_gpu
from pipeline.worker import bounds_of, probe
from pipeline.workspace import workplace

SOON_S = 20.0
"""Delay before the nodes that have not answered are reported."""

LATE_S = 120.0
"""How long the start waits after the last answer for a node that others use; it joins when it
answers.
"""

ONLY_NODE_S = 1200.0
"""How long the start waits after the last answer for the only node of a class: longer than the
default timeout of a judge.
"""


@frozen
class SharedFiles:
    """What the nodes of a campaign share.

    Attributes:
        store: folder of the store, which all nodes must see.
        files: catalog; if a node does not see it, sources are shipped through the store.
        bucket_uri: URI of a store in a bucket, which all nodes must reach instead of a folder.
    """

    store: Path
    files: Path
    bucket_uri: str | None = None


@frozen
class Inspected:
    """What a task found on a node.

    Attributes:
        problem: why the node cannot use the store; None if it can.
        sees_files: whether it has the files of the catalog.
    """

    facts: ClassFacts
    problem: str | None
    sees_files: bool = True


@dataclass(kw_only=True)
class NodeCheck:
    """The check of a node: the task for each class, one for all CPU classes, and those that ended.

    A GPU class has no task if Ray has no GPU there.
    """

    node: Node
    tasks: dict[str, Handle]
    ended: dict[Handle, Done] = field(default_factory=dict)

    @property
    def pending(self) -> set[Handle]:
        """The tasks that have not ended."""
        return set(self.tasks.values()) - self.ended.keys()

    @property
    def end_on_cpu(self) -> Done:
        """The end of the task for CPU classes, which has ended."""
        return self.ended[self.tasks[PORTABLE]]

    def done(self, name: str) -> Done | None:
        """Return the end of the task for a class; None if there is none."""
        task = self.tasks.get(name)
        return None if task is None else self.ended.get(task)

    def facts(self, name: str) -> ClassFacts | None:
        """Return the facts of the node for a class, if they are known."""
        done = self.done(name)
        return None if done is None or done.failure else done.value.facts

    def __str__(self) -> str:
        classes = ", ".join(self.node.classes)
        return f"{self.node}, which serves {classes}: its cores or GPUs are in use"


class NodeChecks:
    """Checks nodes.

    Args:
        cluster: cluster of the nodes.
        note: takes lines for the user.
        shared: what the nodes must see.

    Attributes:
        under_way: checks by node id.
        mark: folder in the store that all nodes must see.
    """

    def __init__(
        self,
        cluster: Cluster,
        note: Note,
        shared: SharedFiles,
    ) -> None:
        self.under_way: dict[str, NodeCheck] = {}
        self.mark = shared.store
        self._cluster = cluster
        self._note = note
        self._shared = shared

    def start(self, node: Node) -> None:
        """Start the check of a node for its classes."""
        cpu = [name for name in node.classes if not takes_gpu(name)]
        tasks = dict.fromkeys(cpu, self._start_task(node, cpu[0]))
        if node.num_gpus:
            tasks |= {
                name: self._start_task(node, name) for name in node.classes if takes_gpu(name)
            }
        self.under_way[node.node_id] = NodeCheck(node=node, tasks=tasks)

    def _start_task(self, node: Node, name: str) -> Handle:
        return self._cluster.start(
            inspect,
            name,
            self._shared,
            self.mark,
            _identity(self._shared.files),
            name=f"probe {name}",
            class_name=name,
            node=node,
        )

    def collect(self, timeout_s: float = 0) -> int:
        """Collect the tasks that ended, and return their number."""
        waiting = {task: check for check in self.under_way.values() for task in check.pending}
        done = self._cluster.wait([*waiting], timeout_s) if waiting else []
        for end in done:
            waiting[end.handle].ended[end.handle] = end
        return len(done)

    def take_complete(self) -> list[NodeCheck]:
        """Remove and return the complete checks."""
        complete = [check for check in self.under_way.values() if not check.pending]
        for check in complete:
            del self.under_way[check.node.node_id]
        return complete

    def wait(self, wait_s: float) -> None:
        """Wait for all checks, except of late nodes that no class depends on.

        Args:
            wait_s: minimal time to wait for the only node of a class, after the last answer.

        Raises:
            InfrastructureError: the only node of a class is in use by others.
        """
        answered = time.monotonic()
        reported = False
        while late := [check for check in self.under_way.values() if check.pending]:
            if self.collect(timeout_s=0.5):
                answered = time.monotonic()
                continue
            silent_s = time.monotonic() - answered
            needed = self._needed(late)
            if not needed and silent_s >= LATE_S:
                for check in late:
                    self._note(f"starting without {check}; it is used once it answers")
                return
            if needed and silent_s >= max(ONLY_NODE_S, wait_s):
                name, check = needed[0]
                raise InfrastructureError(
                    f"no node for {name} had a free core or GPU for {silent_s:.0f} s: {check}."
                    f" Free it, start another node for {name}, or leave the class out"
                    " (--device-class)",
                    code="CP-NO-NODE",
                )
            if not reported and silent_s >= SOON_S:
                reported = True
                for check in late:
                    self._note(f"waiting for {check}")

    def _needed(self, late: Collection[NodeCheck]) -> list[tuple[str, NodeCheck]]:
        """Return the classes that only late nodes may serve, each with its first node."""
        complete = [check for check in self.under_way.values() if not check.pending]
        known = {name for check in complete for name in check.tasks if check.facts(name)}
        needed = []
        for check in late:
            for name, task in check.tasks.items():
                may_serve = task in check.pending or check.facts(name) is not None
                if may_serve and name not in known:
                    needed.append((name, check))
        return needed


def inspect(
    name: str,
    shared: SharedFiles,
    mark: Path,
    identity: tuple[int, int] | None,
) -> Inspected:
    """On a node: return its facts for a class, and what it sees of the store and the catalog.

    Args:
        name: device class.
        shared: what it must see. A store in a bucket must be reachable; no files are assumed to be
            shared then.
        mark: folder in the store.
        identity: size and time of the catalog, as the driver sees it.
    """
    problem = None
    if shared.bucket_uri is None:
        sees_files = _identity(shared.files) == identity
        if not mark.is_dir():
            problem = f"it does not see the store {shared.store}"
    else:
        sees_files = False
        try:
            workplace(shared.bucket_uri)
        except Exception as error:
            problem = (
                f"opening the store {shared.bucket_uri} there fails:"
                f" {type(error).__name__}: {error}"
            )
    return Inspected(
        facts=probe(name),
        problem=problem,
        sees_files=sees_files,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the size and time of a file; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def facts_here(
    entries: Sequence[Entry], requested: Collection[str], note: Note
) -> dict[str, ClassFacts]:
    """Return the facts of the requested classes, as a local Ray would find them.

    Args:
        entries: entries of the catalog.
        requested: classes of the catalog, also `auto`.
        note: takes lines for the user.
    """
    served = detect().classes
    wanted = {PORTABLE, *requested} - {"auto", AUTO_PRECISE}
    if {"auto", AUTO_PRECISE} & set(requested):
        wanted.update(auto_classes(served, precise=AUTO_PRECISE in requested))
    on_cpu, lesser = probe(PORTABLE), lesser_classes(served)
    facts = {name: replace(on_cpu, is_best=name not in lesser) for name in sorted(wanted)}
    for name in facts:
        if name not in served:
            counts = [count for entry in entries for count in entry.threads]
            facts[name] = replace(on_cpu, num_threads=max([on_cpu.num_threads, *counts]))
            note(
                f"{name}: this machine does not serve it; --address plans it for the workers of a"
                " cluster"
            )
        elif takes_gpu(name):
            facts[name] = probe(name)
    return facts


def with_memory_here(known: FleetFacts) -> dict[str, ClassFacts]:
    """Return recorded facts with the memory of this machine, which no record has."""
    return {
        name: replace(facts, memory_bytes=bounds_of(Limits(), name).memory_bytes)
        for name, facts in known.items()
    }
