"""Fleet: the nodes of the cluster that a campaign uses, from its start to its end.

assemble   at the start: which nodes there are, and what they have in common with the driver; or a wait until they are there
tick       during the campaign: nodes that joined are examined and used, nodes that left are dropped, doubtful ones are asked
facts      what the workers of each class build with

Before a node is used it shows that it sees the store (a file just written there), whether it sees the catalog's files, and what it
builds with: a candidate is kept under its class's toolchain, so a node of the class with another one would file it wrongly.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from freezer.device_class import DEVICE_CLASSES, PORTABLE, auto_classes, detect, device_class
from freezer.durable import write_whole
from freezer.errors import InfrastructureError
from pipeline.cluster import Cluster, Done, Handle, Node
from pipeline.events import Event
from pipeline.staging import own_path
from pipeline.tasks import ClassFacts, probe

REFRESH_S = 2.0
"""Between two looks at the list of nodes."""

EXAMINE_S = 120.0
"""How long a node may take to look for the store. What it builds with is asked by a task that takes a core, which may have to wait
there for another campaign's judge: in mid-campaign as long as the node lives, at the start see LATE_S and HELD_S."""

SOON_S = 20.0
"""After which it is said, at the start, for which nodes is waited."""

LATE_S = 120.0
"""How long the others wait at the start, after the last answer, for one whose cores or GPUs are taken: it joins when it answers."""

HELD_S = 1200.0
"""How long the only node of a class is waited for, after the last answer: longer than another campaign's judge takes by default."""

AGAIN_S = 30.0
"""Until a node whose examination was lost is examined again."""

GONE_S = 60.0
"""How long a class may be without a node in mid-campaign, unless it was told to wait for nodes."""

WAIT_S = 1800.0
"""How long `--wait-for-nodes` waits unless it is told otherwise."""

SAY_S = 60.0
"""Between two lines that say what is waited for."""

MAX_ASKED = 2
"""Cores to ask an autoscaler for, for each that a class has; so a fleet grows by doubling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one task that waits needs of a node, as an autoscaler is asked for it.

    Attributes:
        memory_bytes: None where any node has enough.
    """

    device_class: str
    num_cpus: int = 1
    memory_bytes: int | None = None


@dataclass(kw_only=True)
class _Examined:
    """A node that shows what it is."""

    node: Node
    since: float
    handles: dict[str, Handle]
    found: dict[str, Done] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it has shown all."""
        return len(self.found) == len(self.handles)

    def probed(self, name: str) -> Done | None:
        """What it builds with for a class; None for a GPU that it does not give out."""
        return self.found.get(self._probe(name))

    def shows(self, name: str) -> bool:
        """Whether it has shown that it can be built on for a class."""
        probed, looked = self.probed(name), "look" in self.found or "look" not in self.handles
        return name in self.node.classes and looked and probed is not None and probed.failure is None

    def owes(self, name: str) -> bool:
        """Whether it has yet to show what it builds with for a class."""
        return name in self.node.classes and self._probe(name) in self.handles and self.probed(name) is None

    def leave_gpus(self, why: str) -> bool:
        """Do without the GPUs that it has not shown, if that is all that it has not; whether it was."""
        owed = self.handles.keys() - self.found.keys()
        if owed & {"look", "probe"}:
            return False
        self.found |= {what: Done(handle=self.handles[what], failure=why) for what in owed}
        return True

    def _probe(self, name: str) -> str:
        return _probe_of(name) if device_class(name).kind == "cuda" else "probe"


def _probe_of(name: str) -> str:
    return f"probe {name}"


class Fleet:
    """The nodes that a campaign uses.

    Args:
        cluster: that they are of.
        show: takes the events.
        store: folder of the store that all must see; a file is written there.
        files: of the catalog; what a node does not see must travel through the store.
        wait_s: how long to wait for nodes of a class that has none; None is not at all.
        reached: URI of a store in a bucket, which all must reach instead of seeing a folder.
        before: what each class was planned for when the campaign was started, if it goes on: thread counts and toolchains are in
            the keys, so both stay while a node serves them.

    Attributes:
        blind: whether some node does not see the catalog's files.
    """

    def __init__(
        self,
        cluster: Cluster,
        show: Callable[[Event], None],
        *,
        store: Path,
        files: Path,
        wait_s: float | None,
        reached: str | None = None,
        before: Mapping[str, ClassFacts] | None = None,
    ) -> None:
        self.cluster, self.wait_s = cluster, wait_s if cluster.joined else None
        self._show, self._store, self._files, self._reached = show, store, files, reached
        self._before = before or {}
        self._mark = own_path(store, f"seen-{uuid.uuid4().hex}")
        self.blind = False
        self._used: dict[str, Node] = {}
        self._refused: dict[str, float] = {}
        self._examined: dict[str, _Examined] = {}
        self._doubted: dict[str, Handle] = {}
        self._toolchains: dict[str, Mapping[str, Any]] = {}
        self._memory_bytes: dict[str, int | None] = {}
        self._asked: dict[Ask, list[Handle]] = {}
        self._next = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that tasks may be given to now."""
        return tuple(node for name, node in self._used.items() if name not in self._doubted)

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class that some node serves."""
        return _classes(self.nodes)

    @property
    def patience_s(self) -> float:
        """How long a class may be without a node in mid-campaign."""
        return GONE_S if self.wait_s is None else self.wait_s

    def facts(self) -> Mapping[str, ClassFacts]:
        """What the workers of each class build with, the thread count to build for: the cores of its smallest node, or what it was
        when the campaign was started, and the most memory that an item may use.
        """
        return {
            name: ClassFacts(
                num_threads=self._num_threads(name),
                toolchain=self._toolchains[name],
                memory_bytes=self._memory_bytes[name],
            )
            for name in _classes(self._used.values())
        }

    def assemble(self, wanted: Collection[str]) -> None:
        """Find the nodes, and examine them.

        Args:
            wanted: classes that are asked for by name, for which is waited.

        Raises:
            InfrastructureError: there is no node, none has a label, one does not see the store, none can be built on, or the only
                one of a class is held by others.
        """
        nodes = self._waited_for(wanted)
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._mark, b"a node that sees this file sees the store\n")
        for node in nodes:
            self._examine(node, next((name for name in node.classes if name in wanted), node.classes[0]))
        self._wait_for_probes({*(wanted or _auto(nodes)), PORTABLE})
        examined = [item for item in self._examined.values() if item.complete]
        self._examined = {name: item for name, item in self._examined.items() if not item.complete}
        unseen = [item.node for item in examined if not self._sees(item, "store") and item.found["look"].failure is None]
        if unseen and self._reached is not None:
            raise InfrastructureError(
                f"{len(unseen)} node(s) do not reach the store {self._reached}, the first is {unseen[0].node_id}: "
                f"{self._said(next(item for item in examined if item.node is unseen[0]))}",
                code="CP-STORE-UNSHARED",
            )
        if unseen:
            raise InfrastructureError(
                f"{len(unseen)} node(s) do not see the store's {self._store}, the first is {unseen[0].node_id}; put it on storage "
                "that all nodes mount at the same path",
                code="CP-STORE-UNSHARED",
            )
        self._settle_toolchains(examined)
        for item in examined:
            self._admit(item)
        if not self._used:
            why = next(done.failure for item in examined for done in item.found.values() if done.failure is not None)
            raise InfrastructureError(f"no node can be built on; the first says: {why}")

    def tick(self) -> None:
        """Take in what has changed; called often, looks seldom."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_S
            self._refresh()
        self._collect(timeout_s=0)
        for node_id in [name for name, item in self._examined.items() if item.complete]:
            self._admit(self._examined.pop(node_id))

    def doubt(self, node: Node) -> None:
        """Give no more tasks to a node until it answers: one of its tasks was lost."""
        if node.node_id in self._used and node.node_id not in self._doubted:

            def answer() -> bool:
                return True

            self._doubted[node.node_id] = self.cluster.glance(answer, name="answer", device_class_=node.classes[0], node=node)

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask an autoscaler for nodes: by tasks that do nothing, and wait for what they ask until they have it.

        Args:
            wanted: how many of each. What nothing wants any more is taken back; single ones are not, since Ray would go on asking
                while any of a kind waits. Nothing is asked where nobody waits for nodes.
        """
        if self.wait_s is None:
            return
        waiting = [handle for handles in self._asked.values() for handle in handles]
        ended = {done.handle for done in self.cluster.wait(waiting, timeout_s=0)} if waiting else set()
        for ask in {*wanted, *self._asked}:
            count, pending = wanted.get(ask, 0), [handle for handle in self._asked.pop(ask, []) if handle not in ended]
            if count:
                self._asked[ask] = [*pending, *(self._ask(ask) for _ in range(count - len(pending)))]
            else:
                self.cluster.cancel(pending, grace_s=1)

    def _ask(self, ask: Ask) -> Handle:
        name = ask.device_class
        return self.cluster.start(
            _nothing, name=f"ask {name}", device_class_=name, num_cpus=ask.num_cpus, memory_bytes=ask.memory_bytes
        )

    def close(self) -> None:
        """Leave nothing in the store. Tasks that still wait end with the driver."""
        self._mark.unlink(missing_ok=True)

    def _waited_for(self, wanted: Collection[str]) -> list[Node]:
        """The nodes, when every wanted class has one, or at the end of the wait. The plan complains of what is still missing."""
        deadline = time.monotonic() + (self.wait_s or 0)
        said = 0.0
        while True:
            nodes = self.cluster.nodes()
            problem = _problem(nodes)
            lacking = [name for name in wanted if name not in _classes(nodes)]
            if not problem and (not lacking or self.wait_s is None):
                break
            if time.monotonic() >= deadline:
                if problem:
                    raise problem
                self._note(f"no node for {', '.join(lacking)} after {self.wait_s:g} s")
                break
            if time.monotonic() >= said:
                said = time.monotonic() + SAY_S
                labels = " and ".join(f"coldpress.dev/{name}=true" for name in lacking) or "coldpress.dev/<device class>=true"
                left = deadline - time.monotonic()
                self._note(f"waiting up to {left:.0f} s for nodes labelled {labels}; nodes serve {', '.join(_classes(nodes))}")
            self.ask({Ask(device_class=name): 1 for name in lacking or [PORTABLE]})
            time.sleep(1)
        return nodes

    def _wait_for_probes(self, needed: Collection[str]) -> None:
        """Return when all nodes have shown what they are, or all but late ones that no class depends on.

        Raises:
            InfrastructureError: a class depends on one that is held by others.
        """
        started = answered = time.monotonic()
        said, num_found = started + SOON_S, 0
        while late := [item for item in self._examined.values() if not item.complete]:
            self._collect(timeout_s=0.5)
            now, before = time.monotonic(), num_found
            num_found = sum(len(item.found) for item in self._examined.values())
            answered = now if num_found > before else answered
            held = [(name, item) for item in late for name in _classes([item.node]) if name in needed and item.owes(name)]
            shown = {name for item in self._examined.values() for name in needed if item.shows(name)}
            needs = {name: item for name, item in held if name not in shown}
            if needs and now >= answered + max(HELD_S, self.wait_s or 0):
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
                for item in late:
                    self._note(f"waiting for {self._held(item)}")

    def _leave_out(self, late: Collection[_Examined]) -> None:
        """Begin without these nodes, or without their GPUs."""
        for item in late:
            why = f"no answer: {self.cluster.in_use(item.node)}"
            if not item.leave_gpus(why):
                self._note(f"begun without {self._held(item)}; it is used when it answers")

    def _held(self, item: _Examined) -> str:
        return f"node {item.node.node_id[:12]}, which serves {', '.join(item.node.classes)}: {self.cluster.in_use(item.node)}"

    def _examine(self, node: Node, name: str) -> None:
        handles: dict[str, Handle] = {}
        if self.cluster.joined:
            look: Callable[..., Any] = _looker() if self._reached is None else _reacher()
            paths = (str(self._mark), str(self._files)) if self._reached is None else (self._reached,)
            handles["look"] = self.cluster.glance(look, *paths, name="look", device_class_=name, node=node)
        on_gpu = [given for given in node.classes if device_class(given).kind == "cuda" and node.num_gpus]
        on_cpu = name if device_class(name).kind != "cuda" else PORTABLE
        for what, of in (("probe", on_cpu), *((_probe_of(of), of) for of in on_gpu)):
            handles[what] = self.cluster.start(probe, of, node.num_cpus, name=f"probe {of}", device_class_=of, node=node)
        self._examined[node.node_id] = _Examined(node=node, since=time.monotonic(), handles=handles)

    def _collect(self, timeout_s: float) -> None:
        """Take in what examined and doubted nodes have shown."""
        waiting = {
            handle: (item, what)
            for item in self._examined.values()
            for what, handle in item.handles.items()
            if what not in item.found
        }
        asked = {handle: node_id for node_id, handle in self._doubted.items()}
        handles = [*waiting, *asked]
        for done in self.cluster.wait(handles, timeout_s) if handles else ():
            if done.handle in asked:
                node_id = asked[done.handle]
                del self._doubted[node_id]
                if done.failure is not None and node_id in self._used:
                    lost = self._used.pop(node_id)  # it is examined anew, if it is still listed
                    self._note(f"node {node_id[:12]} does not answer ({done.failure}); it served {', '.join(lost.classes)}")
            else:
                item, what = waiting[done.handle]
                item.found[what] = done
        for item in self._examined.values():
            silent = "look" in item.handles and "look" not in item.found and time.monotonic() > item.since + EXAMINE_S
            for what, handle in item.handles.items() if silent else ():
                item.found[what] = Done(handle=handle, failure=f"no answer within {EXAMINE_S:g} s")

    def _refresh(self) -> None:
        alive = {node.node_id: node for node in self.cluster.nodes()}
        for node_id in [name for name in self._used if name not in alive]:
            self._note(f"node {node_id[:12]} left; it served {', '.join(self._used[node_id].classes)}")
            del self._used[node_id]
            self._doubted.pop(node_id, None)
        for node_id in [name for name in self._examined if name not in alive]:
            del self._examined[node_id]
        for node_id, node in alive.items():
            name = next((name for name in node.classes if name in self._toolchains), None)
            known = node_id in self._used or node_id in self._examined or time.monotonic() < self._refused.get(node_id, 0)
            if name is not None and not known:
                self._examine(node, name)

    def _num_threads(self, name: str) -> int:
        counts = [node.num_cpus for node in self._used.values() if name in node.classes]
        before = self._before.get(name)
        if before is not None and before.num_threads <= max(counts):
            return before.num_threads
        if before is not None:
            self._note(
                f"{name} is for {min(counts)} threads now, since no node has the {before.num_threads} CPUs that it was for when "
                "the campaign was started: what was finished for these is done again"
            )
        return min(counts)

    def _toolchain(self, name: str, said: Collection[ClassFacts]) -> Mapping[str, Any]:
        """What a class builds with: what it did when the campaign was started, if a node still does; else what most do."""
        counted = Counter(_text(facts.toolchain) for facts in said)
        found = {_text(facts.toolchain): facts.toolchain for facts in said}
        usual = min(counted, key=lambda text: (-counted[text], text))
        if name in self._before and _text(self._before[name].toolchain) in found:
            usual = _text(self._before[name].toolchain)
        elif name in self._before:
            self._note(
                f"{name} is built with {usual} now, since no node has what it was built with when the campaign was started, "
                f"{_text(self._before[name].toolchain)}: what was finished with that is done again"
            )
        return found[usual]

    def _settle_toolchains(self, examined: Collection[_Examined]) -> None:
        """For each class the toolchain that its nodes are to have; portable is built by any node."""
        for name in _classes([item.node for item in examined]):
            probed = [item.probed(name) for item in examined if name in item.node.classes]
            said = [done.value for done in probed if done is not None and done.value]
            if said:
                self._toolchains[name] = self._toolchain(name, said)
                self._memory_bytes[name] = max((facts.memory_bytes or 0 for facts in said), default=0) or None

    def _admit(self, item: _Examined) -> None:
        """Use a node that has shown what it is, for the classes that it fits; or say why not."""
        node = item.node
        failure = next(
            (item.found[what].failure for what in ("look", "probe") if what in item.found and item.found[what].failure), None
        )
        if failure is not None:
            why: str | None = f"{failure}; it is asked again in {AGAIN_S:g} s"
        elif not self._sees(item, "store"):
            why = f"it does not see the store's {self._store}"
            if self._reached is not None:
                why = f"it does not reach the store: {self._said(item)}"
        else:
            fitting = tuple(name for name in node.classes if self._fits(item, name))
            node = replace(node, classes=fitting)
            why = None if fitting else "it builds with other tools than the others"
        if why is not None:
            self._refused[node.node_id] = time.monotonic() + AGAIN_S if failure is not None else math.inf
            self._note(f"node {node.node_id[:12]} is not used: {why}")
            return
        self.blind = self.blind or not self._sees(item, "files")
        self._used[node.node_id] = node
        if self._next:
            self._note(f"node {node.node_id[:12]} joined, for {', '.join(node.classes)}")

    def _fits(self, item: _Examined, name: str) -> bool:
        """Whether a node builds for a class with what the others of the class build with; says so where it does not."""
        probed, why = item.probed(name), ""
        if probed is None:
            why = "it has no GPU that Ray gives out; start it with --num-gpus"
        elif probed.failure is not None:
            why = probed.failure
        elif self._toolchains.get(name, probed.value.toolchain) != probed.value.toolchain:
            why = f"it builds with {probed.value.toolchain}, others of the class do not"
        if why:
            self._note(f"node {item.node.node_id[:12]} is not used for {name}: {why}")
        return not why

    def _sees(self, item: _Examined, what: Literal["store", "files"]) -> bool:
        """Whether a node sees a file or folder as it is here; a local Ray sees all."""
        if "look" not in item.handles:
            return True
        if self._reached is not None:  # nothing but the store is shared
            return what == "store" and not self._said(item)
        place = ("store", "files").index(what)
        here = _looker()(str(self._mark), str(self._files))
        return item.found["look"].failure is None and item.found["look"].value[place] == here[place]

    def _said(self, item: _Examined) -> str:
        """Why a node does not reach a store in a bucket; nothing where it does."""
        look = item.found["look"]
        return look.failure or str(look.value)

    def _note(self, text: str) -> None:
        self._show(Event(kind="note", text=text))


@contextmanager
def assembled(fleet: Fleet, wanted: Collection[str]) -> Iterator[Fleet]:
    """A fleet for the length of a campaign.

    Raises:
        InfrastructureError: as of `Fleet.assemble`.
    """
    try:
        fleet.assemble(wanted)
        yield fleet
    finally:
        fleet.close()


def _nothing() -> None:
    """What an autoscaler is asked for a node for."""


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
            from pipeline.workplace import workplace

            workplace(store)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return reach


def _classes(nodes: Collection[Node]) -> tuple[str, ...]:
    found = {name for node in nodes for name in node.classes}
    return tuple(name for name in DEVICE_CLASSES if name in found)


def _text(toolchain: Mapping[str, Any]) -> str:
    """A toolchain in one line, whatever the order of its parts."""
    return json.dumps(toolchain, sort_keys=True)


def _auto(nodes: Collection[Node]) -> set[str]:
    """What is asked for where no class is named."""
    return {name for node in nodes for name in auto_classes(node.classes)}


def _problem(nodes: Collection[Node]) -> InfrastructureError | None:
    """Why nothing can run on a cluster of these nodes."""
    if not nodes:
        return InfrastructureError("the cluster has no node with a CPU; start workers with `ray start`", code="CP-RAY")
    if not any(node.labelled for node in nodes):
        level = next((name for name in detect().classes if name != PORTABLE), "cpu-x86-64-v3")
        return InfrastructureError(
            "no node of the cluster carries a label coldpress.dev/<device class>; start workers with "
            f"`ray start --labels=coldpress.dev/{level}=true`, or with what `python -m jobs.worker_labels` prints there",
            code="CP-NO-NODE",
        )
    return None
