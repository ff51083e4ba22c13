"""`portable` is checked on every other architecture: the checks run here, in their children."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from freezer.artifact import Artifact
from freezer.store import Store
from pipeline.ledger import Ledger
from pipeline.planning import Item
from pipeline.publish import Publisher
from pipeline.records import Event, Outcome
from pipeline.scheduling.architectures import PortableChecks
from tests.conftest import Frozen
from tests.support.campaigns import entry, judged, plan_of
from tests.support.one_node import NODE, InProcess, OneNode
from tests.support.steps import with_golden

ARM = replace(NODE, node_id="arm", machine="aarch64", emulated=True)
X86_64 = {"machine": "x86_64"}


def checked(
    item: Item, outcome: Outcome, cluster: InProcess, store: Store
) -> tuple[Outcome, list[str]]:
    """The outcome after its check on Arm, and what was said."""
    shown: list[Event] = []
    checks = PortableChecks(OneNode(cluster, store.root, NODE, ARM), store.uri, shown.append)
    assert checks.start(item, outcome)
    assert cluster.nodes_used == [ARM]
    (done,) = cluster.wait([*checks.handles], 0)
    ((_, ended),) = checks.end(done)
    assert not checks.handles
    return ended, [event.text for event in shown]


def planned(store: Store, ledger: Ledger, artifact: Artifact) -> tuple[Item, Outcome]:
    """A model that was judged for `portable` on x86-64."""
    model = replace(entry("mlp", store.root.parent), device_classes=("portable",))
    (item,) = plan_of([model], store, ledger).items
    return item, replace(judged(item, "published", store, artifact), host=X86_64)


def test_a_version_names_who_checked_it(store: Store, ledger: Ledger, portable: Frozen) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    ended, said = checked(item, outcome, InProcess(), store)
    assert (ended.verdict, said) == ("published", [])
    (final,) = Publisher(plan_of([item.entry], store, ledger), store, ledger).add(item, ended)
    manifest = store.manifest(store.version("mlp"), "portable")
    assert manifest.provenance["host"]["others"] == ["aarch64"]
    assert final.version == 1


def shifted(values: Tensor) -> Tensor:
    return values + 1


def test_drift_on_another_architecture_rejects(
    store: Store, ledger: Ledger, portable: Frozen, tmp_path: Path
) -> None:
    wrong = with_golden(portable.artifact, tmp_path / "wrong", shifted)
    ended, _ = checked(*planned(store, ledger, wrong), InProcess(), store)
    assert ended.verdict == "rejected"
    assert str(ended.reason).startswith("on aarch64: ")
    assert not ended.has_artifact


def test_a_lost_node_decides_nothing(store: Store, ledger: Ledger, portable: Frozen) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    ended, said = checked(item, outcome, InProcess(lost=True), store)
    assert ended == outcome
    assert ["aarch64" in text for text in said] == [True]


@pytest.mark.parametrize("changed", [{"verdict": "rejected"}, {"cached": True}, {"host": {}}])
def test_only_new_portable_artifacts_wait(
    store: Store, ledger: Ledger, portable: Frozen, changed: dict[str, Any]
) -> None:
    item, outcome = planned(store, ledger, portable.artifact)
    nodes = [NODE] if "host" in changed else [ARM]
    checks = PortableChecks(OneNode(InProcess(), store.root, *nodes), store.uri, lambda _: None)
    assert not checks.start(item, replace(outcome, **changed))
