"""Check a node before it is used: whether it sees the store and the files of the catalog, and its toolchain for each class.

The first two need a task that takes no core. A toolchain needs a core, or a GPU for a GPU class, so this task may wait for the
judge of another campaign.
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
"""How long a node may take to look for the store. Reporting its toolchain may take any time during a campaign; at its start see
LATE_S and HELD_S."""

SOON_S = 20.0
"""Delay before the nodes that have not answered are reported."""

LATE_S = 120.0
"""How long the start waits after the last answer for a node whose cores or GPUs are in use; it joins when it answers."""

HELD_S = 1200.0
"""How long the start waits after the last answer for the only node of a class: longer than the default timeout of a judge."""

SAY_S = 60.0
"""Interval between two reports of what the start waits for."""

LOOK, PROBE = "look", "probe"
"""Names of the tasks; for a GPU class `probe CLASS`."""


@dataclass(kw_only=True)
class Examination:
    """The check of a node.

    Attributes:
        since: its start; monotonic, in seconds.
        handles: of its tasks, by name.
        found: ended tasks, by name.
        reported: whether the user was told that the node is late.
    """

    node: Node
    since: float
    handles: dict[str, Handle]
    found: dict[str, Done] = field(default_factory=dict)
    reported: bool = False

    @property
    def complete(self) -> bool:
        """Whether all tasks ended."""
        return len(self.found) == len(self.handles)

    @property
    def failure(self) -> str | None:
        """Why the node cannot be used for any class; None if it can."""
        ended = (self.found[what].failure for what in (LOOK, PROBE) if what in self.found)
        return next((failure for failure in ended if failure is not None), None)

    def probed(self, name: str) -> Done | None:
        """Return the facts of the node for a class; None if Ray has no GPU there."""
        return self.found.get(_probe_of(name))

    def shows(self, name: str) -> bool:
        """Whether the node is known to build for a class."""
        probed, looked = self.probed(name), LOOK in self.found or LOOK not in self.handles
        return name in self.node.classes and looked and probed is not None and probed.failure is None

    def owes(self, name: str) -> bool:
        """Whether the facts for a class are still missing."""
        return name in self.node.classes and _probe_of(name) in self.handles and self.probed(name) is None

    def leave_gpus(self, why: str) -> bool:
        """Use the node without its unanswered GPUs, and return True; return False if its CPUs did not answer either."""
        owed = self.handles.keys() - self.found.keys()
        if owed & {LOOK, PROBE}:
            return False
        self.found |= {what: Done(handle=self.handles[what], failure=why) for what in owed}
        return True


class Examiner:
    """Checks nodes.

    Args:
        cluster: of the nodes.
        note: takes lines for the user.
        store, files, reached: as in `Fleet`.

    Attributes:
        under_way: checks by node id.
    """

    def __init__(
        self, cluster: Cluster, note: Callable[[str], None], *, store: Path, files: Path, reached: str | None = None
    ) -> None:
        self.under_way: dict[str, Examination] = {}
        self._cluster, self._note, self._store, self._files, self._reached = cluster, note, store, files, reached
        self._mark = own_path(store, f"seen-{uuid.uuid4().hex}")

    def open(self) -> None:
        """Write the file that all nodes must see."""
        make_folder(self._mark.parent)
        write_whole(self._mark, b"a node that sees this file sees the store\n")

    def close(self) -> None:
        """Remove that file. Tasks that still wait end with the driver."""
        with contextlib.suppress(OSError):  # the next campaign cleans the staging folders
            remove(self._mark)

    def examine(self, node: Node, name: str) -> None:
        """Start the check of a node, as one of a class."""
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
        """Drop the checks of other nodes."""
        self.under_way = {name: item for name, item in self.under_way.items() if name in alive}

    def collect(self, timeout_s: float = 0) -> None:
        """Collect the tasks that ended."""
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
        """Remove and return the complete checks."""
        ended = [item for item in self.under_way.values() if item.complete]
        self.under_way = {name: item for name, item in self.under_way.items() if not item.complete}
        return ended

    def wait(self, needed: Collection[str], wait_s: float) -> None:
        """Wait for all checks, except of late nodes that no class depends on.

        Args:
            needed: classes to build for.
            wait_s: minimal time to wait for the only node of a class, after the last answer.

        Raises:
            InfrastructureError: the only node of a class is in use by others.
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
                    f"no node for {name} had a free core or GPU for {now - started:.0f} s: {self._held(item)}. Free it, start "
                    f"another node for {name}, or leave the class out (--device-class)",
                    code="CP-NO-NODE",
                )
            if not needs and now >= answered + LATE_S:
                self._leave_out(late)
                return
            if now >= said:
                said = now + SAY_S
                self._report(late)

    def report_late(self) -> None:
        """Report each late node once."""
        late = time.monotonic() - SOON_S
        self._report([item for item in self.under_way.values() if not item.complete and not item.reported and item.since < late])

    def unseen(self, item: Examination) -> str | None:
        """Return why a node cannot use the store; None if it can, or did not answer. A local Ray sees everything."""
        if LOOK not in item.handles or item.found[LOOK].failure is not None:
            return None
        if self._reached is not None:
            said = str(item.found[LOOK].value)
            return f"opening the store there fails: {said}" if said else None
        return None if self._sees(item, self._mark) else f"it does not see the store's {self._store}"

    def sees_files(self, item: Examination) -> bool:
        """Whether a node sees the files of the catalog. With a store in a bucket, no files are assumed to be shared."""
        return LOOK not in item.handles or (self._reached is None and self._sees(item, self._files))

    def _sees(self, item: Examination, path: Path) -> bool:
        there = dict(zip((self._mark, self._files), item.found[LOOK].value, strict=True))
        return bool(there[path] == _looker()(str(path))[0])

    def _report(self, late: Collection[Examination]) -> None:
        for item in late:
            item.reported = True
            self._note(f"waiting for {self._held(item)}")

    def _leave_out(self, late: Collection[Examination]) -> None:
        """Start without these nodes, or without their GPUs."""
        for item in late:
            why = f"no answer: {self._cluster.in_use(item.node)}"
            if not item.leave_gpus(why):
                item.reported = True
                self._note(f"starting without {self._held(item)}; it is used once it answers")

    def _held(self, item: Examination) -> str:
        return f"node {item.node.node_id[:12]}, which serves {', '.join(item.node.classes)}: {self._cluster.in_use(item.node)}"


def facts_of(examined: Collection[Examination], name: str) -> list[ClassFacts]:
    """Return the facts of all nodes that serve a class."""
    probed = [item.probed(name) for item in examined if name in item.node.classes]
    return [done.value for done in probed if done is not None and done.value]


def _probe_of(name: str) -> str:
    return f"{PROBE} {name}" if device_class(name).kind == "cuda" else PROBE


def _looker() -> Callable[..., list[tuple[int, int] | None]]:
    def look(*names: str) -> list[tuple[int, int] | None]:  # pickled by value, since a node may not have this module yet
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
    def reach(store: str) -> str:  # pickled by value, as above
        try:
            from pipeline.workspace.workspace import workplace

            workplace(store)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return reach
