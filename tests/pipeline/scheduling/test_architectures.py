"""`portable` is checked on every other architecture: the checks run here, in their children."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from freezer.artifact import Artifact
from freezer.store import Store
from pipeline.cluster import Done, Node
from pipeline.ledger import Ledger
from pipeline.planning import Item
from pipeline.publish import Publisher
from pipeline.records import Event, Outcome
from pipeline.scheduling.architectures import PortableChecks
from tests.conftest import Frozen
from tests.support.campaigns import entry, judged, plan_of
from tests.support.one_node import NODE, NoRay, OneNode
from tests.support.steps import with_golden

ARM = replace(NODE, node_id="arm", machine="aarch64", emulated=True)
X86_64 = {"machine": "x86_64"}


class Here(NoRay):
    """Runs a task where it is started, unless its node is lost."""

    def __init__(self, *, lost: bool = False) -> None:
        super().__init__()
        self.started: list[Done] = []
        self.nodes_used: list[Node] = []
        self._lost = lost

    def start(  # type: ignore[override]
        self, function: Callable[..., Any], *args: object, node: Node, **_: object
    ) -> int:
        self.nodes_used.append(node)
        handle = len(self.started)
        done = Done(handle=handle, failure="NodeDiedError: gone", lost=True)
        if not self._lost:
            done = Done(handle=handle, value=function(*args))
        self.started.append(done)
        return handle


def checked(item: Item, outcome: Outcome, cluster: Here, store: Store) -> tuple[Outcome, list[str]]:
    """The outcome after its check on Arm, and what was said."""
    shown: list[Event] = []
    fleet = OneNode(cluster, store.root, NODE, ARM)
    checks = PortableChecks(fleet, store.uri, shown.append)
    assert checks.start(item, outcome)
    assert cluster.nodes_used == [ARM]
    ((_, ended),) = [each for done in cluster.started for each in checks.end(done)]
    assert not checks.handles
    return ended, [event.text for event in shown]


def planned(store: Store, ledger: Ledger, artifact: Artifact) -> tuple[Item, Outcome]:
    """A model that was judged for `portable` on x86-64."""
    model = replace(entry("mlp", store.root.parent), device_classes=("portable",))
    (item,) = plan_of([model], store, ledger).items
    return item, replace(judged(item, "published", store, artifact), host=X86_64)


def test_a_version_names_who_checked_it(store: Store, ledger: Ledger, portable: Frozen) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    ended, said = checked(item, outcome, Here(), store)
    assert (ended.verdict, said) == ("published", [])
    plan = plan_of([item.entry], store, ledger)
    (final,) = Publisher(plan, store, ledger).add(item, ended)
    manifest = store.manifest(store.version("mlp"), "portable")
    assert manifest.provenance["host"]["others"] == ["aarch64"]
    assert final.version == 1


def shifted(values: Tensor) -> Tensor:
    return values + 1


def test_drift_on_another_architecture_rejects(
    store: Store, ledger: Ledger, portable: Frozen, tmp_path: Path
) -> None:
    wrong = with_golden(portable.artifact, tmp_path / "wrong", shifted)
    ended, _ = checked(*planned(store, ledger, wrong), Here(), store)
    assert ended.verdict == "rejected"
    assert str(ended.reason).startswith("on aarch64: ")
    assert not ended.has_artifact


def test_a_lost_node_decides_nothing(store: Store, ledger: Ledger, portable: Frozen) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    ended, said = checked(item, outcome, Here(lost=True), store)
    assert ended == outcome
    assert ["aarch64" in text for text in said] == [True]


@pytest.mark.parametrize("changed", [{"verdict": "rejected"}, {"cached": True}, {"host": {}}])
def test_only_new_portable_artifacts_wait(
    store: Store, ledger: Ledger, portable: Frozen, changed: dict[str, Any]
) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    nodes = [NODE] if "host" in changed else [ARM]
    checks = PortableChecks(OneNode(Here(), store.root, *nodes), store.uri, lambda _: None)
    assert not checks.start(item, replace(outcome, **changed))
