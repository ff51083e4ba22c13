"""Check a node before it is used: whether it sees the store and the files of the catalog, and its
toolchain for each class.

The first two need a task that takes no core. A toolchain needs a core, or a GPU for a GPU class, so
this task may wait for the judge of another campaign.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from freezer.errors import InfrastructureError
from freezer.files import make_folder, remove, write_whole
from freezer.hardware import PORTABLE
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

LOOK, CPU = "look", "cpu"
"""Names of the tasks of a check; the probe of a GPU has the name of its class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What a node sees: why it cannot use the store, or None, and whether it has the files of the
    catalog.
    """

    problem: str | None = None
    sees_files: bool = True


@dataclass(kw_only=True)
class NodeCheck:
    """The check of a node: its tasks, and those that ended, by name."""

    node: Node
    tasks: dict[str, Handle]
    found: dict[str, Done] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all tasks ended."""
        return len(self.found) == len(self.tasks)

    @property
    def only_looks(self) -> bool:
        """Whether it waits for nothing but the look at the store, which takes no core."""
        return self.tasks.keys() - self.found.keys() == {LOOK}

    @property
    def sight(self) -> Sight:
        """What the node sees; a local Ray sees everything."""
        looked = self.found.get(LOOK)
        return looked.value if looked is not None and looked.failure is None else Sight()

    @property
    def failure(self) -> str | None:
        """Why the node cannot be used for any class; None if it can."""
        ended = (self.found[name].failure for name in (LOOK, CPU) if name in self.found)
        return next((failure for failure in ended if failure is not None), self.sight.problem)

    def probed(self, name: str) -> Done | None:
        """Return the end of the probe for a class; None if it has not ended, or Ray has no GPU
        there.
        """
        return self.found.get(_probe_of(name))

    def may_know(self, name: str) -> bool:
        """Whether the facts of a class are known, or its probe has not ended."""
        return (
            _probe_of(name) in self.tasks.keys() - self.found.keys() or self.facts(name) is not None
        )

    def facts(self, name: str) -> ClassFacts | None:
        """Return the facts of the node for a class, if it serves the class and they are known."""
        probed = self.probed(name)
        return probed.value if name in self.node.classes and probed is not None else None


class NodeChecks:
    """Checks nodes.

    Args:
        cluster: of the nodes.
        note: takes lines for the user.
        store, files, bucket_uri: as in `Fleet`.

    Attributes:
        under_way: checks by node id.
    """

    def __init__(
        self,
        cluster: Cluster,
        note: Callable[[str], None],
        *,
        store: Path,
        files: Path,
        bucket_uri: str | None,
    ) -> None:
        self.under_way: dict[str, NodeCheck] = {}
        self._cluster, self._note, self._store, self._files, self._bucket_uri = (
            cluster,
            note,
            store,
            files,
            bucket_uri,
        )
        self._mark = own_path(store, f"seen-{uuid.uuid4().hex}")

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
        tasks: dict[str, Handle] = {}
        on_cpu = next((name for name in node.classes if not takes_gpu(name)), PORTABLE)
        if self._cluster.joined:
            args = (self._bucket_uri, self._mark, self._files, _identity(self._files))
            tasks[LOOK] = self._cluster.glance(
                look, *args, name=LOOK, device_class_=on_cpu, node=node
            )
        for name in (on_cpu, *(name for name in node.classes if takes_gpu(name) and node.num_gpus)):
            tasks[_probe_of(name)] = self._cluster.start(
                probe, name, node.num_cpus, name=f"probe {name}", device_class_=name, node=node
            )
        self.under_way[node.node_id] = NodeCheck(node=node, tasks=tasks)

    def collect(self, timeout_s: float = 0) -> int:
        """Collect the tasks that ended, and return their number."""
        waiting = {
            handle: (check, name)
            for check in self.under_way.values()
            for name, handle in check.tasks.items()
            if name not in check.found
        }
        ended = self._cluster.wait([*waiting], timeout_s) if waiting else []
        for done in ended:
            check, name = waiting[done.handle]
            check.found[name] = done
        return len(ended)

    def take_complete(self) -> list[NodeCheck]:
        """Remove and return the complete checks."""
        complete = [check for check in self.under_way.values() if check.complete]
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
        while late := [check for check in self.under_way.values() if not check.complete]:
            if self.collect(timeout_s=0.5):
                answered = time.monotonic()
            now = time.monotonic()
            complete = [check for check in self.under_way.values() if check.complete]
            known = {
                name
                for check in complete
                for name in check.node.classes
                if check.facts(name) is not None
            }
            needed = [
                (name, check)
                for check in late
                for name in check.node.classes
                if check.may_know(name) and name not in known
            ]
            blind = next(((name, check) for name, check in needed if check.only_looks), None)
            if blind and now >= answered + max(LATE_S, wait_s):
                name, check = blind
                raise InfrastructureError(
                    f"no node for {name} answered for {now - answered:.0f} s: {self._held(check)}."
                    " Mend the mount or the access there, or leave the class out (--device-class)",
                    code="CP-STORE-UNSHARED",
                )
            if needed and now >= answered + max(ONLY_NODE_S, wait_s):
                name, check = needed[-1]
                raise InfrastructureError(
                    f"no node for {name} had a free core or GPU for {now - started:.0f} s:"
                    f" {self._held(check)}. Free it, start another node for {name}, or leave the"
                    " class out (--device-class)",
                    code="CP-NO-NODE",
                )
            if not needed and now >= answered + LATE_S:
                for check in late:
                    self._note(f"starting without {self._held(check)}; it is used once it answers")
                return
            if not reported and now >= started + SOON_S:
                reported = True
                for check in late:
                    self._note(f"waiting for {self._held(check)}")

    def _held(self, check: NodeCheck) -> str:
        why = (
            f"it does not say whether it sees {self._bucket_uri or self._store}"
            if check.only_looks
            else self._cluster.in_use(check.node)
        )
        return (
            f"node {check.node.node_id[:12]}, which serves {', '.join(check.node.classes)}: {why}"
        )


def look(
    bucket_uri: str | None, mark: Path, files: Path, identity: tuple[int, int] | None
) -> Sight:
    """On a node: look for the store and the files of the catalog.

    Args:
        bucket_uri: URI of a store in a bucket; no files are assumed to be shared then.
        mark: file in the folder of a store.
        files: of the catalog, with the size and time that the driver sees.
        identity: that size and time.
    """
    if bucket_uri is None:
        problem = None if mark.is_file() else f"it does not see the store's {mark.parents[1]}"
        return Sight(problem=problem, sees_files=_identity(files) == identity)
    try:
        workplace(bucket_uri)
    except Exception as error:
        return Sight(
            problem=f"opening the store {bucket_uri} there fails: {type(error).__name__}: {error}"
        )
    return Sight(sees_files=False)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the size and time of a file; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _probe_of(name: str) -> str:
    return name if takes_gpu(name) else CPU
