"""Campaigns on a real cluster of two unlike nodes: placed by class, judged alone, two at once, and with nodes that come and go."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import V3, V4
from tests.cluster.watched import Interval, intervals
from tests.raylets import RayCluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "pipeline" / "models" / "campaign_models.py"


def catalog(folder: Path, names: str, *, seconds: float = 0.0, recipe: str = "torchscript-frozen") -> Path:
    """A catalog of small models, one for each letter, each slow to load."""
    folder.mkdir(parents=True)
    shutil.copy(MODELS, folder)
    entries = "\n".join(
        f'  - {{name: {name}, source: "python:campaign_models:slow_to_build", args: {{width: {8 + i}, seconds: {seconds}}}, '
        f"inputs: [{{shape: [1, {8 + i}]}}]}}"
        for i, name in enumerate(names)
    )
    path = folder / "catalog.yaml"
    path.write_text(f"defaults: {{recipes: [{recipe}], device_classes: [{V3}, {V4}]}}\nmodels:\n{entries}\n")
    return path


def watched(folder: Path, *options: str) -> list[str]:
    """The command of a campaign that is named as its folder, as is its store."""
    script = ROOT / "tests" / "cluster" / "watched.py"
    store = folder / folder.name
    words = (script, folder / "catalog.yaml", store, f"sqlite:///{folder}/mlflow.db", folder.name, *options)
    return [sys.executable, "-u", *(str(word) for word in words)]


def outcomes(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    report = json.loads((folder / folder.name / "out.json").read_text())
    return {(item["model"], item["device_class"]): item for item in report["outcomes"]}


def beside_a_judge(found: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Each judge with what ran on its node meanwhile."""
    return [(a, b) for a in found for b in found if a.kind == "judge" and a is not b and a.overlaps(b)]


def test_two_campaigns_build_and_judge_on_two_nodes_and_every_judge_is_alone(cluster: RayCluster, tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    catalog(few, "a")
    catalog(many, "abcd", seconds=1.0)
    with cluster.popen(watched(many)) as second, cluster.popen(watched(few)) as first:
        said_first = first.communicate(timeout=240)[0]
        said_second = second.communicate(timeout=240)[0]
    assert first.returncode == 0, said_first
    assert second.returncode == 0, said_second
    assert f"Ray has 2 node(s) for portable, {V3}, {V4}" in said_first
    found = intervals(few / "few", many / "many")
    assert len([one for one in found if one.kind == "build"]) == len([one for one in found if one.kind == "judge"]) == 3 * 5
    assert beside_a_judge(found) == []
    nodes = {
        device_class: {one.node_id for one in found if one.what.endswith(device_class)} for device_class in (V3, V4, "portable")
    }
    assert len(nodes[V3]) == len(nodes[V4]) == 1
    assert nodes[V3] != nodes[V4]
    assert nodes["portable"] == nodes[V3] | nodes[V4], "both nodes share what any can do"
    last = max(one.end for one in found if one.kind == "judge" and one.campaign == "few")
    assert any(one.start > last for one in found if one.kind == "build"), (
        "the judges of one did not wait for all builds of the other"
    )
    threads = {name: outcome["num_threads"] for (_, name), outcome in outcomes(few).items()}
    assert threads == {V3: 1, V4: 2, "portable": 1}
