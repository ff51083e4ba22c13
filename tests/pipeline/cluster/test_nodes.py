"""The nodes of a cluster, from Ray's rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from pipeline.cluster.head_monitor import Head
from pipeline.cluster.ray_cluster import Cluster
from pipeline.records import LABEL


@pytest.mark.parametrize(
    ("labels", "classes", "lesser"),
    [
        (("cpu-neoverse-v2", "cpu-aarch64"), ("cpu-neoverse-v2", "portable"), frozenset()),
        (("cpu-aarch64",), ("cpu-aarch64", "portable"), frozenset()),
        (
            ("cpu-x86-64-v4", "cpu-x86-64-v3", "cpu-zen4"),
            ("cpu-x86-64-v3", "cpu-x86-64-v4", "cpu-zen4", "portable"),
            frozenset({"cpu-x86-64-v3"}),
        ),
    ],
)
def test_nodes_serve_classes_that_they_can_build(
    monkeypatch: pytest.MonkeyPatch,
    labels: tuple[str, ...],
    classes: tuple[str, ...],
    lesser: frozenset[str],
) -> None:
    """OneDNN cannot be limited to a lesser Arm class."""
    row: dict[str, Any] = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 1.0}}
    row["Labels"] = {f"{LABEL}{name}": "true" for name in labels}
    monkeypatch.setattr(ray, "nodes", lambda: [row])
    monkeypatch.setattr(Cluster, "_draining", lambda self: set())
    head = cast(Head, SimpleNamespace(answers=lambda: True))
    (node,) = Cluster(joined=True, head=head).nodes()
    assert node.classes == classes
    assert node.lesser == lesser
    assert node.machine == ("x86_64" if "x86" in classes[0] else "aarch64")
