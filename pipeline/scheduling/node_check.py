"""Examination: what a node shows before it is used.

It shows that it sees the store (a file just written there), whether it sees the catalog's files, and what it builds with for each
of its classes. The first two are asked by a task that takes no core; the last by one that takes a core, or a GPU for each class of
GPUs, so it may have to wait for another campaign's judge.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freezer.errors import InfrastructureError
from freezer.files.atomic import make_folder, remove, write_whole
from freezer.hardware.device_classes import PORTABLE, device_class
from pipeline.cluster.nodes import Done, Handle, Node, classes_of
from pipeline.cluster.ray_cluster import Cluster
from pipeline.records.class_facts import ClassFacts
from pipeline.worker.probe import probe
from pipeline.workspace.staging import own_path

LOOK_S = 120.0
"""How long a node may take to look for the store. What it builds with may take as long as the node lives in mid-campaign; at the
start see LATE_S and HELD_S."""

SOON_S = 20.0
"""After which it is said for which nodes is waited."""

LATE_S = 120.0
"""How long the others wait at the start, after the last answer, for one whose cores or GPUs are taken: it joins when it answers."""

HELD_S = 1200.0
"""How long the only node of a class is waited for, after the last answer: longer than another campaign's judge takes by default."""

SAY_S = 60.0
"""Between two lines that say what is waited for at the start."""

LOOK, PROBE = "look", "probe"
"""Names of the tasks; that of a GPU class is `probe CLASS`."""


@dataclass(kw_only=True)
class Examination:
    """A node that shows what it is.

    Attributes:
        since: when it was asked; monotonic, in seconds.
        handles: of the tasks that it was asked by.
        found: what has ended of these.
        told: whether it was said that it is waited for.
    """

    node: Node
    since: float
    handles: dict[str, Handle]
    found: dict[str, Done] = field(default_factory=dict)
    told: bool = False

    @property
    def complete(self) -> bool:
        """Whether the node has shown all."""
        return len(self.found) == len(self.handles)

    @property
    def failure(self) -> str | None:
        """Why nothing at all is known of the node, if that is so."""
        ended = (self.found[what].failure for what in (LOOK, PROBE) if what in self.found)
        return next((failure for failure in ended if failure is not None), None)

    def probed(self, name: str) -> Done | None:
        """What the node builds with for a class; None for a GPU that it does not give out."""
        return self.found.get(_probe_of(name))

    def shows(self, name: str) -> bool:
        """Whether it has shown that it can be built on for a class."""
        probed, looked = self.probed(name), LOOK in self.found or LOOK not in self.handles
        return name in self.node.classes and looked and probed is not None and probed.failure is None

    def owes(self, name: str) -> bool:
        """Whether it has yet to show what it builds with for a class."""
        return name in self.node.classes and _probe_of(name) in self.handles and self.probed(name) is None

    def leave_gpus(self, why: str) -> bool:
        """Do without the GPUs that it has not shown, if that is all that it has not; whether it was."""
        owed = self.handles.keys() - self.found.keys()
        if owed & {LOOK, PROBE}:
            return False
        self.found |= {what: Done(handle=self.handles[what], failure=why) for what in owed}
        return True


class Examiner:
    """Examines nodes.

    Args:
        cluster: that they are of.
        note: takes what a user is told.
        store: folder of the store that all must see; a file is written there.
        files: of the catalog.
        reached: URI of a store in a bucket, which all must reach instead of seeing a folder.

    Attributes:
        under_way: by node id.
    """

    def __init__(
        self, cluster: Cluster, note: Callable[[str], None], *, store: Path, files: Path, reached: str | None = None
    ) -> None:
        self.under_way: dict[str, Examination] = {}
        self._cluster, self._note, self._store, self._files, self._reached = cluster, note, store, files, reached
        self._mark = own_path(store, f"seen-{uuid.uuid4().hex}")

    def open(self) -> None:
        """Write the file that all must see."""
        make_folder(self._mark.parent)
        write_whole(self._mark, b"a node that sees this file sees the store\n")

    def close(self) -> None:
        """Leave nothing in the store. Tasks that still wait end with the driver."""
        with contextlib.suppress(OSError):  # it lies among the staging folders
            remove(self._mark)

    def examine(self, node: Node, name: str) -> None:
        """Ask a node what it is, as one of a class."""
        handles: dict[str, Handle] = {}
        if self._cluster.joined:
            look: Callable[..., Any] = _looker() if self._reached is None else _reacher()
            paths = (str(self._mark), str(self._files)) if self._reached is None else (self._reached,)
            handles[LOOK] = self._cluster.glance(look, *paths, name=LOOK, device_class_=name, node=node)
        on_gpu = [given for given in node.classes if device_class(given).kind == "cuda" and node.num_gpus]
        on_cpu = name if device_class(name).kind != "cuda" else PORTABLE
        for of in (on_cpu, *on_gpu):
            handles[_probe_of(of)] = self._cluster.start(probe, of, node.num_cpus, name=f"probe {of}", device_class_=of, node=node)
        self.under_way[node.node_id] = Examination(node=node, since=time.monotonic(), handles=handles)

    def forget(self, alive: Collection[str]) -> None:
        """Drop the nodes that are not among these."""
        self.under_way = {name: item for name, item in self.under_way.items() if name in alive}

    def collect(self, timeout_s: float = 0) -> None:
        """Take in what nodes have shown."""
        waiting = {
            handle: (item, what)
            for item in self.under_way.values()
            for what, handle in item.handles.items()
            if what not in item.found
        }
        for done in self._cluster.wait([*waiting], timeout_s) if waiting else ():
            item, what = waiting[done.handle]
            item.found[what] = done
        for item in self.under_way.values():
            silent = LOOK in item.handles and LOOK not in item.found and time.monotonic() > item.since + LOOK_S
            for what, handle in item.handles.items() if silent else ():
                item.found[what] = Done(handle=handle, failure=f"no answer within {LOOK_S:g} s")

    def ended(self) -> list[Examination]:
        """Hand out the nodes that have shown all."""
        ended = [item for item in self.under_way.values() if item.complete]
        self.under_way = {name: item for name, item in self.under_way.items() if not item.complete}
        return ended

    def wait(self, needed: Collection[str], wait_s: float) -> None:
        """Return when all nodes have shown what they are, or all but late ones that no class depends on.

        Args:
            needed: classes that are built for.
            wait_s: the least that the only node of a class is waited for, after the last answer.

        Raises:
            InfrastructureError: a class depends on a node that is held by others.
        """
        started = answered = time.monotonic()
        said, num_found = started + SOON_S, 0
        while late := [item for item in self.under_way.values() if not item.complete]:
            self.collect(timeout_s=0.5)
            now, before = time.monotonic(), num_found
            num_found = sum(len(item.found) for item in self.under_way.values())
            answered = now if num_found > before else answered
            held = [(name, item) for item in late for name in classes_of([item.node]) if name in needed and item.owes(name)]
            shown = {name for item in self.under_way.values() for name in needed if item.shows(name)}
            needs = {name: item for name, item in held if name not in shown}
            if needs and now >= answered + max(HELD_S, wait_s):
                name, item = next(reversed(needs.items()))
                raise InfrastructureError(
                    f"no node for {name} has given a core or GPU for {now - started:.0f} s: {self._held(item)}. End what holds it, "
                    f"start another node for {name}, or leave the class out (--device-class)",
                    code="CP-NO-NODE",
                )
            if not needs and now >= answered + LATE_S:
                self._leave_out(late)
                return
            if now >= said:
                said = now + SAY_S
                self._tell(late)

    def tell_late(self) -> None:
        """Say for which nodes is waited, once for each."""
        late = time.monotonic() - SOON_S
        self._tell([item for item in self.under_way.values() if not item.complete and not item.told and item.since < late])

    def unseen(self, item: Examination) -> str | None:
        """Why a node cannot use the store; None where it can, or has not told. A local Ray sees all."""
        if LOOK not in item.handles or item.found[LOOK].failure is not None:
            return None
        if self._reached is not None:
            said = str(item.found[LOOK].value)
            return f"opening the store there fails: {said}" if said else None
        return None if self._sees(item, self._mark) else f"it does not see the store's {self._store}"

    def sees_files(self, item: Examination) -> bool:
        """Whether a node sees the catalog's files as they are here; with a store in a bucket nothing else is shared."""
        return LOOK not in item.handles or (self._reached is None and self._sees(item, self._files))

    def _sees(self, item: Examination, path: Path) -> bool:
        there = dict(zip((self._mark, self._files), item.found[LOOK].value, strict=True))
        return bool(there[path] == _looker()(str(path))[0])

    def _tell(self, late: Collection[Examination]) -> None:
        for item in late:
            item.told = True
            self._note(f"waiting for {self._held(item)}")

    def _leave_out(self, late: Collection[Examination]) -> None:
        """Begin without these nodes, or without their GPUs."""
        for item in late:
            why = f"no answer: {self._cluster.in_use(item.node)}"
            if not item.leave_gpus(why):
                item.told = True
                self._note(f"begun without {self._held(item)}; it is used when it answers")

    def _held(self, item: Examination) -> str:
        return f"node {item.node.node_id[:12]}, which serves {', '.join(item.node.classes)}: {self._cluster.in_use(item.node)}"


def facts_of(examined: Collection[Examination], name: str) -> list[ClassFacts]:
    """What nodes build with for a class, of all that serve it."""
    probed = [item.probed(name) for item in examined if name in item.node.classes]
    return [done.value for done in probed if done is not None and done.value]


def _probe_of(name: str) -> str:
    return f"{PROBE} {name}" if device_class(name).kind == "cuda" else PROBE


def _looker() -> Callable[..., list[tuple[int, int] | None]]:
    def look(*names: str) -> list[tuple[int, int] | None]:  # travels by value: a node may not have this module yet
        from pathlib import Path

        found: list[tuple[int, int] | None] = []
        for name in names:
            try:
                stat = Path(name).stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_size, stat.st_mtime_ns))
        return found

    return look


def _reacher() -> Callable[..., str]:
    def reach(store: str) -> str:  # travels by value, as above
        try:
            from pipeline.workspace.workspace import workplace

            workplace(store)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return reach
