"""Check a node before it is used: whether it sees the store and the files of the catalog, and its
toolchain for each class.

The first two need a task that takes no core. A toolchain needs a core, or a GPU for a GPU class, so
this task may wait for the judge of another campaign.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezer.errors import InfrastructureError
from freezer.files import make_folder, remove, write_whole
from freezer.hardware import PORTABLE, auto_classes, available_cpus, detect
from pipeline.catalog import Entry
from pipeline.cluster import Cluster, Done, Handle, Node
from pipeline.records import ClassFacts
from pipeline.scheduling.queue import takes_gpu
from pipeline.worker import probe
from pipeline.workspace import own_path, workplace

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

STORAGE = "storage"
CPU = "cpu"
"""Names of the tasks of a check; the probe of a GPU has the name of its class."""


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class SharedFiles:
    """What the nodes of a campaign share.

    Attributes:
        store: folder of the store that all nodes must see; a file is written there.
        files: catalog; if a node does not see it, sources are shipped through the store.
        bucket_uri: URI of a store in a bucket, which all nodes must reach instead of a folder.
    """

    store: Path
    files: Path
    bucket_uri: str | None = None


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class Visibility:
    """What a node sees.

    Attributes:
        problem: why it cannot use the store; None if it can.
        sees_files: whether it has the files of the catalog.
    """

    problem: str | None = None
    sees_files: bool = True


@dataclass(kw_only=True)
class NodeCheck:
    """The check of a node: its tasks that have not ended, and the ends of the others, by name."""

    node: Node
    pending: dict[str, Handle]
    ended: dict[str, Done] = field(default_factory=dict)

    @property
    def awaits_storage(self) -> bool:
        """Whether it waits for nothing but the task at the store, which takes no core."""
        return list(self.pending) == [STORAGE]

    @property
    def visibility(self) -> Visibility:
        """What the node sees; a local Ray sees everything."""
        done = self.ended.get(STORAGE)
        return done.value if done is not None and done.failure is None else Visibility()

    @property
    def failure(self) -> str | None:
        """Why the node cannot be used for any class; None if it can."""
        for name in (STORAGE, CPU):
            if name in self.ended and self.ended[name].failure is not None:
                return self.ended[name].failure
        return self.visibility.problem

    def probed(self, name: str) -> Done | None:
        """Return the end of the probe for a class; None if it has not ended, or Ray has no GPU
        there.
        """
        return self.ended.get(_probe_of(name))

    def facts(self, name: str) -> ClassFacts | None:
        """Return the facts of the node for a class, if it serves the class and they are known."""
        probed = self.probed(name)
        return probed.value if name in self.node.classes and probed is not None else None


class NodeChecks:
    """Checks nodes.

    Args:
        cluster: cluster of the nodes.
        note: takes lines for the user.
        shared: what the nodes must see.

    Attributes:
        under_way: checks by node id.
    """

    def __init__(self, cluster: Cluster, note: Callable[[str], None], shared: SharedFiles) -> None:
        self.under_way: dict[str, NodeCheck] = {}
        self._cluster = cluster
        self._note = note
        self._shared = shared
        self._mark = own_path(shared.store, f"seen-{uuid.uuid4().hex}")

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Keep a file in the store that all nodes must see."""
        make_folder(self._mark.parent)
        write_whole(self._mark, b"a node that sees this file sees the store\n")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the next campaign cleans the staging folders
                remove(self._mark)

    def start(self, node: Node) -> None:
        """Start the check of a node for its classes."""
        cluster = self._cluster
        shared = self._shared
        gpus = [name for name in node.classes if takes_gpu(name)]
        on_cpu = next((name for name in node.classes if name not in gpus), PORTABLE)
        pending: dict[str, Handle] = {}
        if cluster.joined:
            args = (shared, self._mark, _identity(shared.files))
            pending[STORAGE] = cluster.start(
                visible, *args, name=STORAGE, class_name=on_cpu, node=node, num_cpus=0
            )
        for name in (on_cpu, *gpus) if node.num_gpus else (on_cpu,):
            pending[_probe_of(name)] = cluster.start(
                probe,
                name,
                node.num_cpus,
                name=f"probe {name}",
                class_name=name,
                node=node,
            )
        self.under_way[node.node_id] = NodeCheck(node=node, pending=pending)

    def collect(self, timeout_s: float = 0) -> int:
        """Collect the tasks that ended, and return their number."""
        waiting = {
            handle: (check, name)
            for check in self.under_way.values()
            for name, handle in check.pending.items()
        }
        done = self._cluster.wait([*waiting], timeout_s) if waiting else []
        for end in done:
            check, name = waiting[end.handle]
            check.ended[name] = end
            del check.pending[name]
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
            InfrastructureError: the only node of a class is in use by others, or does not answer
                whether it sees the store.
        """
        started = answered = time.monotonic()
        reported = False
        while True:
            if self.collect(timeout_s=0.5):
                answered = time.monotonic()
            late = [check for check in self.under_way.values() if check.pending]
            now = time.monotonic()
            needed = self._needed(late)
            for name, check in needed:
                self._refuse_silent(name, check, now - answered, wait_s)
            if not late:
                return
            if not needed and now >= answered + LATE_S:
                for check in late:
                    text = f"starting without {self._described(check)}"
                    self._note(f"{text}; it is used once it answers")
                return
            if not reported and now >= started + SOON_S:
                reported = True
                for check in late:
                    self._note(f"waiting for {self._described(check)}")

    def _needed(self, late: Collection[NodeCheck]) -> list[tuple[str, NodeCheck]]:
        """Return the late checks that a class depends on, each with the class."""
        complete = [check for check in self.under_way.values() if not check.pending]
        needed: list[tuple[str, NodeCheck]] = []
        for check in late:
            for name in check.node.classes:
                may_serve = _probe_of(name) in check.pending or check.facts(name) is not None
                is_known = any(other.facts(name) is not None for other in complete)
                if may_serve and not is_known:
                    needed.append((name, check))
        return needed

    def _refuse_silent(self, name: str, check: NodeCheck, silent_s: float, wait_s: float) -> None:
        what = "had a free core or GPU"
        limit_s = ONLY_NODE_S
        code = "CP-NO-NODE"
        remedy = f"Free it, start another node for {name}"
        if check.awaits_storage:
            what = "answered"
            limit_s = LATE_S
            code = "CP-STORE-UNSHARED"
            remedy = "Mend the mount or the access there"
        if silent_s >= max(limit_s, wait_s):
            raise InfrastructureError(
                f"no node for {name} {what} for {silent_s:.0f} s: {self._described(check)}."
                f" {remedy}, or leave the class out (--device-class)",
                code=code,
            )

    def _described(self, check: NodeCheck) -> str:
        node = check.node
        reason = "its cores or GPUs are in use"
        if check.awaits_storage:
            where = self._shared.bucket_uri or self._shared.store
            reason = f"it does not say whether it sees {where}"
        return f"{node}, which serves {', '.join(node.classes)}: {reason}"


def visible(shared: SharedFiles, mark: Path, identity: tuple[int, int] | None) -> Visibility:
    """On a node: return what it sees of the store and the files of the catalog.

    Args:
        shared: what it must see. A store in a bucket must be reachable; no files are assumed to be
            shared then.
        mark: file in the folder of a store.
        identity: size and time of the catalog, as the driver sees it.
    """
    if shared.bucket_uri is None:
        problem = None if mark.is_file() else f"it does not see the store's {mark.parents[1]}"
        return Visibility(problem=problem, sees_files=_identity(shared.files) == identity)
    try:
        workplace(shared.bucket_uri)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Visibility(problem=f"opening the store {shared.bucket_uri} there fails: {reason}")
    return Visibility(sees_files=False)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the size and time of a file; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _probe_of(name: str) -> str:
    return name if takes_gpu(name) else CPU


def facts_here(
    entries: Sequence[Entry],
    requested: Collection[str],
    before: Mapping[str, ClassFacts],
    note: Callable[[str], None],
) -> dict[str, ClassFacts]:
    """Return the facts of the requested classes, as a local Ray would find them.

    Args:
        entries: entries of the catalog.
        requested: classes of the catalog, also `auto`.
        before: facts of the campaign that this start continues, also for classes that this machine
            does not serve.
        note: takes lines for the user.
    """
    served = detect().classes
    num_cpus = available_cpus()
    wanted = {PORTABLE, *requested} - {"auto"}
    if "auto" in requested:
        wanted.update(auto_classes(served))
    on_cpu = probe(next(name for name in served if not takes_gpu(name)), num_cpus)
    facts: dict[str, ClassFacts] = {}
    for name in sorted(wanted):
        known = before.get(name)
        if name in served:
            facts[name] = probe(name, num_cpus) if takes_gpu(name) else on_cpu
            if known is not None and known.num_threads <= num_cpus:
                facts[name] = replace(facts[name], num_threads=known.num_threads)
        elif known is not None:
            facts[name] = known
        else:
            counts = [count for entry in entries for count in entry.threads]
            facts[name] = replace(on_cpu, num_threads=max([num_cpus, *counts]))
            note(
                f"{name}: this machine does not serve it; --address plans it for the workers of a"
                " cluster"
            )
    return facts
