"""A fleet with two versions of torch: half of it is upgraded, then the rest, and then
rolled back.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from freezer.artifact import version_tuple
from freezer.hardware import PORTABLE
from freezer.store import Store
from tests.cluster.conftest import V3, V4, watched
from tests.support.campaign_runs import write_catalog
from tests.support.commands import output
from tests.support.fault_sites import Driver
from tests.support.raylets import ROOT, RayCluster

NEWER = os.environ.get("COLDPRESS_NEWER_TORCH", "")
REASON = (
    "set COLDPRESS_NEWER_TORCH to a folder with a newer torch: python -m pip install --target"
    " FOLDER torch==2.14.1"
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not NEWER, reason=REASON),
]

WITH_NEWER = {"PYTHONPATH": f"{NEWER}{os.pathsep}{ROOT}"}
WITH_OWN = {"PYTHONPATH": str(ROOT)}

CATALOG = f"""
defaults:
  recipes: [torchscript-frozen]
  device_classes: [{V3}, {V4}]
  threads: [1]
  limits: {{speedup_min: 0.01}}
models:
  - name: a
    source: python:campaign_models:good
    inputs: [{{shape: [1, 16]}}]
"""

SERVE = """
import json, sys, torch, freezer
torch.set_num_threads(1)
found = {"torch": torch.__version__}
try:
    model = freezer.load(sys.argv[1], store=sys.argv[2], device_class=sys.argv[3])
    found["answer"] = model(torch.ones(1, 16)).flatten().tolist()
except freezer.errors.IncompatibleError as error:
    found["refused"] = [refusal.reason for refusal in error.ladder]
print(json.dumps(found))
"""


def served(
    reference: str, store: Path, device_class: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What a deployment does with an artifact."""
    command = [sys.executable, "-W", "ignore", "-c", SERVE, reference, store, device_class]
    return json.loads(output(*command, env={**os.environ, **environment}))


def made_with(store: Path, reference: str = "a") -> dict[str, tuple[int, int]]:
    """The torch that made the artifact of each class."""
    opened = Store.open(str(store))
    version = opened.version(reference)
    return {
        name: version_tuple(opened.manifest(version, name).toolchain["torch"])
        for name in version.images
    }


def campaign(cluster: RayCluster, folder: Path) -> Driver:
    """Run the campaign to its end."""
    driver = Driver(cluster.popen(watched(folder)))
    assert driver.end() == 0, driver.output
    return driver


def test_torch_is_upgraded_on_half_then_on_all(private_cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "upgrade"
    store = folder / folder.name
    write_catalog(folder, CATALOG)
    private_cluster.start(num_cpus=0)
    v4 = private_cluster.start(num_cpus=1, classes=[V4])
    private_cluster.start(num_cpus=1, classes=[V3], environ=WITH_NEWER)

    half = campaign(private_cluster, folder)
    own = version_tuple(torch.__version__)
    found = made_with(store)
    newer = found.pop(V3)
    assert newer > own
    assert found == {V4: own, PORTABLE: own}
    assert f"is not used for {PORTABLE}: its toolchain differs: torch" in half.output
    by_own, by_newer = (
        served("a", store, V4, environment) for environment in (WITH_OWN, WITH_NEWER)
    )
    assert version_tuple(by_newer["torch"]) == newer
    assert by_newer["answer"] == pytest.approx(by_own["answer"], abs=1e-6)
    assert served("a", store, V3, WITH_OWN)["refused"] == ["torch_too_old"]

    v4.kill()
    v4 = private_cluster.start(num_cpus=1, classes=[V4], environ=WITH_NEWER)
    everywhere = campaign(private_cluster, folder)
    assert {built.split()[1] for built in everywhere.built} == {V4, PORTABLE}, "v3 is unchanged"
    assert {name: made_with(store)[name] for name in (V3, PORTABLE)} == {V3: newer, PORTABLE: newer}
    assert served("a", store, PORTABLE, WITH_OWN)["refused"] == ["torch_too_old"]
    assert served("a:1", store, V4, WITH_OWN) == by_own, (
        "a deployment that was not upgraded names its version"
    )

    v4.kill()
    private_cluster.start(num_cpus=1, classes=[V4])
    assert not campaign(private_cluster, folder).built, (
        "what the older torch made is not made again"
    )
    assert Store.open(str(store)).versions("a") == [1, 2]
