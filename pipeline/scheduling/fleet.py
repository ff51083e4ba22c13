"""Fleet: the nodes of the cluster that a campaign uses, from its start to its end.

assemble   at the start: which nodes there are, and what they have in common with the driver; or a wait until they are there
tick       during the campaign: nodes that joined are examined and used, nodes that left are dropped, doubtful ones are asked
facts      what the workers of each class build with

A candidate is kept under its class's toolchain, so a node of the class with another one would file it wrongly: it is not used for
the class. How a node is examined is in node_check.py, how an autoscaler is asked for more in cluster/autoscaling.py.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.errors import InfrastructureError
from freezer.hardware.device_classes import PORTABLE, auto_classes
from freezer.hardware.machine import detect
from pipeline.cluster.autoscaling import Ask, Asking
from pipeline.cluster.nodes import Handle, Node, classes_of
from pipeline.cluster.ray_cluster import Cluster
from pipeline.records.class_facts import ClassFacts
from pipeline.records.events import Event
from pipeline.scheduling.node_check import SAY_S, Examination, Examiner, facts_of

REFRESH_S = 2.0
"""Between two looks at the list of nodes."""

AGAIN_S = 30.0
"""Until a node whose examination was lost, or that does not see the store yet, is examined again."""

GONE_S = 60.0
"""How long a class may be without a node in mid-campaign, unless it was told to wait for nodes."""

WAIT_S = 1800.0
"""How long `--wait-for-nodes` waits unless it is told otherwise."""


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
        self._show, self._store, self._reached, self._before = show, store, reached, before or {}
        self._examiner = Examiner(cluster, self._note, store=store, files=files, reached=reached)
        self._asking = Asking(cluster)
        self.blind = False
        self._used: dict[str, Node] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._doubted: dict[str, Handle] = {}
        self._toolchains: dict[str, Mapping[str, Any]] = {}
        self._memory_bytes: dict[str, int | None] = {}
        self._next = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that tasks may be given to now."""
        return tuple(node for name, node in self._used.items() if name not in self._doubted)

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class that some node serves."""
        return classes_of(self.nodes)

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
            for name in classes_of(self._used.values())
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
        self._examiner.open()
        for node in nodes:
            self._examiner.examine(node, next((name for name in node.classes if name in wanted), node.classes[0]))
        self._examiner.wait({*(wanted or _auto(nodes)), PORTABLE}, self.wait_s or 0)
        examined = self._examiner.ended()
        self._check_store(examined)
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
        self._take_answers()
        self._examiner.collect()
        for item in self._examiner.ended():
            self._admit(item)
        self._examiner.tell_late()

    def doubt(self, node: Node) -> None:
        """Give no more tasks to a node until it answers: one of its tasks was lost."""
        if node.node_id in self._used and node.node_id not in self._doubted:

            def answer() -> bool:
                return True

            self._doubted[node.node_id] = self.cluster.glance(answer, name="answer", device_class_=node.classes[0], node=node)

    def ask(self, wanted: Mapping[Ask, int]) -> None:
        """Ask an autoscaler for nodes, if nodes are waited for.

        Args:
            wanted: how many of each; see `Asking.ask`.
        """
        if self.wait_s is not None:
            self._asking.ask(wanted)

    def close(self) -> None:
        """Leave nothing in the store. Tasks that still wait end with the driver."""
        self._examiner.close()

    def _waited_for(self, wanted: Collection[str]) -> list[Node]:
        """The nodes, when every wanted class has one, or at the end of the wait. The plan complains of what is still missing."""
        deadline = time.monotonic() + (self.wait_s or 0)
        said = 0.0
        while True:
            nodes = self.cluster.nodes()
            problem = _problem(nodes)
            lacking = [name for name in wanted if name not in classes_of(nodes)]
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
                self._note(f"waiting up to {left:.0f} s for nodes labelled {labels}; nodes serve {', '.join(classes_of(nodes))}")
            self.ask({Ask(device_class=name): 1 for name in lacking or [PORTABLE]})
            time.sleep(1)
        return nodes

    def _check_store(self, examined: Collection[Examination]) -> None:
        unseen = {item.node.node_id: why for item in examined if (why := self._examiner.unseen(item)) is not None}
        first = next(iter(unseen), None)
        if first is None:
            return
        what = (
            f"do not see the store's {self._store}, the first is {first}; put it on storage that all nodes mount at the same path"
            if self._reached is None
            else f"do not reach the store {self._reached}, the first is {first}: {unseen[first]}"
        )
        raise InfrastructureError(f"{len(unseen)} node(s) {what}", code="CP-STORE-UNSHARED")

    def _take_answers(self) -> None:
        """Use doubted nodes that answer again; drop those whose answer was lost: they are examined anew if still listed."""
        asked = {handle: node_id for node_id, handle in self._doubted.items()}
        for done in self.cluster.wait([*asked], timeout_s=0) if asked else ():
            node_id = asked[done.handle]
            del self._doubted[node_id]
            if done.failure is not None and node_id in self._used:
                lost = self._used.pop(node_id)
                self._note(f"node {node_id[:12]} does not answer ({done.failure}); it served {', '.join(lost.classes)}")

    def _refresh(self) -> None:
        alive = {node.node_id: node for node in self.cluster.nodes()}
        for node_id in [name for name in self._used if name not in alive]:
            self._note(f"node {node_id[:12]} left; it served {', '.join(self._used[node_id].classes)}")
            del self._used[node_id]
            self._doubted.pop(node_id, None)
        self._examiner.forget(alive)
        for node_id, node in alive.items():
            name = next((name for name in node.classes if name in self._toolchains), None)
            again, _ = self._refused.get(node_id, (0, ""))
            known = node_id in self._used or node_id in self._examiner.under_way or time.monotonic() < again
            if name is not None and not known:
                self._examiner.examine(node, name)

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

    def _settle_toolchains(self, examined: Collection[Examination]) -> None:
        """For each class the toolchain that its nodes are to have; portable is built by any node."""
        for name in classes_of([item.node for item in examined]):
            if said := facts_of(examined, name):
                self._toolchains[name] = self._toolchain(name, said)
                self._memory_bytes[name] = max((facts.memory_bytes or 0 for facts in said), default=0) or None

    def _admit(self, item: Examination) -> None:
        """Use a node that has shown what it is, for the classes that it fits; or say why not."""
        node = item.node
        if (why := item.failure or self._examiner.unseen(item)) is not None:
            self._refuse(node, f"{why}; it is asked again every {AGAIN_S:g} s", time.monotonic() + AGAIN_S)
            return
        node = replace(node, classes=tuple(name for name in node.classes if self._fits(item, name)))
        if not node.classes:
            self._refuse(node, "it builds with other tools than the others", math.inf)
            return
        self.blind = self.blind or not self._examiner.sees_files(item)
        self._used[node.node_id] = node
        if self._next:
            self._note(f"node {node.node_id[:12]} joined, for {', '.join(node.classes)}")

    def _refuse(self, node: Node, why: str, until: float) -> None:
        """Do not use a node, nor examine it before a time; say why, once."""
        if self._refused.get(node.node_id, (0, ""))[1] != why:
            self._note(f"node {node.node_id[:12]} is not used: {why}")
        self._refused[node.node_id] = until, why

    def _fits(self, item: Examination, name: str) -> bool:
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
