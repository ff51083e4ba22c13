"""Campaigns on a real cluster of two unlike nodes: placed by class, judged alone, two at once, and with nodes that come and go."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freezer.freezing.models.sources import parse_source
from freezer.limits import Limits, SamplingPolicy
from freezer.spec.inputs import InputSpec
from freezer.spec.items import TensorSpec
from pipeline.catalog.entry import Entry
from pipeline.cluster.connect import connect
from pipeline.worker.requests import BuildRequest, JudgeRequest
from pipeline.worker.tasks import build, judge
from tests.cluster.conftest import V3, V4
from tests.cluster.watched import Interval, burn, intervals
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
    report = json.loads((folder / f"{folder.name}.json").read_text())
    return {(item["model"], item["device_class"]): item for item in report["outcomes"]}


def beside_a_judge(found: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Each judge with what ran on its node meanwhile."""
    return [(a, b) for a in found for b in found if a.kind == "judge" and a is not b and a.overlaps(b)]


def test_two_campaigns_build_and_judge_on_two_nodes_and_every_judge_is_alone(cluster: RayCluster, tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    catalog(few, "a")
    catalog(many, "b", seconds=1.0)
    with cluster.popen(watched(many)) as second, cluster.popen(watched(few)) as first:
        said_first = first.communicate(timeout=400)[0]
        said_second = second.communicate(timeout=400)[0]
    assert first.returncode == 0, said_first
    assert second.returncode == 0, said_second
    assert f"Ray has 2 node(s) for portable, {V3}, {V4}" in said_first
    found = intervals(few / "few", many / "many")
    assert len([one for one in found if one.kind == "build"]) == len([one for one in found if one.kind == "judge"]) == 2 * 3
    assert beside_a_judge(found) == []
    nodes = {
        device_class: {one.node_id for one in found if one.what.endswith(device_class)} for device_class in (V3, V4, "portable")
    }
    assert len(nodes[V3]) == len(nodes[V4]) == 1
    assert nodes[V3] != nodes[V4]
    assert nodes["portable"] == nodes[V3] | nodes[V4], "both nodes share what any can do"
    threads = {name: outcome["num_threads"] for (_, name), outcome in outcomes(few).items()}
    assert threads == {V3: 1, V4: 2, "portable": 1}


@pytest.mark.slow
def test_a_neighbour_would_have_changed_the_verdict(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With protection a judge has its node to itself; the same judge as one task among others finds the node disturbed.

    Slow, since it needs a machine that does next to nothing else: three undisturbed rounds within 16 seconds.
    """
    for name in ("HOME", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, cluster.environment[name])
    path = (str(MODELS.parent),)
    common: dict[str, Any] = {
        "entry": Entry(
            name="good",
            source=parse_source("python:campaign_models:good", folder=MODELS.parent, search_path=path),
            spec=InputSpec(inputs=(TensorSpec(name="input", dtype="float32", shape=(2, 16)),)),
            samples=None,
            task_metric=None,
            limits=Limits(speedup_min=1.05, timeout_s=300),
            device_classes=(V4,),
            recipes=("torchscript-frozen",),
            files=(),
            search_path=path,
        ),
        "device_class": V4,
        "num_threads": 2,
        "store": str(tmp_path),
    }
    # The share of the cores that others may take is between what a machine of other tests takes, and one core of two.
    policy = SamplingPolicy(time_limit_s=8.0, warmup_s=0.2, min_rounds=3, busy_limit=0.35, steal_limit=2.0)
    with connect(cluster.address) as ray:
        node = next(node for node in ray.nodes() if V4 in node.classes)
        place: dict[str, Any] = {"device_class_": V4, "node": node}
        built = ray.result(ray.start(build, BuildRequest(key="b", recipe="torchscript-frozen", **common), name="build", **place))
        assert built.failure is None, built.failure
        found = {}
        for protected in (False, True):
            start = ray.start_alone if protected else ray.start
            request = JudgeRequest(key=f"j{protected}", builds={"torchscript-frozen": "b"}, policy=policy, campaign="c", **common)
            neighbour = ray.start(burn, 8.0 if protected else 300.0, str(tmp_path / f"{protected}"), name="neighbour", **place)
            found[protected] = ray.result(start(judge, request, name="judge", **place))
            assert bool(ray.wait([neighbour], timeout_s=0)) == protected, "a judge that is alone waits for it"
            (tmp_path / f"{protected}").touch()
            ray.result(neighbour)
    assert found[True].verdict == "published", found[True].reason
    assert found[False].verdict == "unstable", found[False].reason
    assert found[True].host["nice"] <= 0
    assert found[True].host["affinity"] == len(os.sched_getaffinity(0))


def lines_until(driver: subprocess.Popen[str], words: str) -> str:
    """What a driver says, up to a line with these words."""
    assert driver.stdout is not None
    said = ""
    for line in driver.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"{words!r} was not said:\n{said}")


@pytest.mark.slow
def test_a_campaign_waits_for_a_node_that_joins_late(private_cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "late"
    catalog(folder, "a")
    private_cluster.start(num_cpus=1, classes=[V4])
    with private_cluster.popen(watched(folder, "wait_s=200")) as driver:
        said = lines_until(driver, "waiting up to")
        assert f"for nodes labelled coldpress.dev/{V3}=true; nodes serve portable, {V4}" in said
        private_cluster.start(num_cpus=1, classes=[V3])
        rest = driver.communicate(timeout=400)[0]
    assert driver.returncode == 0, said + rest
    assert {name for _, name in outcomes(folder)} == {V3, V4, "portable"}


@pytest.mark.slow
def test_nodes_come_and_go_in_mid_campaign(private_cluster: RayCluster, tmp_path: Path) -> None:
    """The v3 node dies in mid-build; a second node of v4 joins and is used; v3 ends as a clear failure, the rest is published."""
    folder = tmp_path / "dying"
    catalog(folder, "abcd", seconds=4.0)
    private_cluster.start(num_cpus=1, classes=[V4])
    dying = private_cluster.start(num_cpus=1, classes=[V3])
    with private_cluster.popen(watched(folder, "gone_s=10")) as driver:
        said = lines_until(driver, f"build a {V3}")
        dying.kill()
        private_cluster.start(num_cpus=1, classes=[V4])
        rest = said + driver.communicate(timeout=500)[0]
    assert driver.returncode == 3, rest
    assert re.search(rf"node \w+ (left|does not answer \(.*\)); it served {V3}, portable", rest), rest
    assert " joined, for " in rest
    found = outcomes(folder)
    assert {item["verdict"] for (_, name), item in found.items() if name == V3} == {"failed"}
    assert all(re.match("CP-(NO-NODE|INFRASTRUCTURE)", item["reason"]) for (_, name), item in found.items() if name == V3)
    assert {item["verdict"] for (_, name), item in found.items() if name != V3} <= {"published", "kept-eager"}
    ran = intervals(folder / folder.name)
    assert len({one.node_id for one in ran if one.what.endswith(V4)}) == 2
    assert beside_a_judge(ran) == []
