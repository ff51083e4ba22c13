"""A campaign on nodes that share only a bucket: neither the store's folder nor the catalog's. Its
first driver is killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import freezer
from freezer.store import Store
from tests.cluster.conftest import V3, V4
from tests.support.buckets import objects
from tests.support.campaign_runs import SHIPPED, ship_files, write_catalog
from tests.support.fault_sites import Driver
from tests.support.raylets import ROOT, RayCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="needs root, to hide the catalog from the nodes by a mount"
    ),
]

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


def test_nodes_that_share_only_a_bucket(
    private_cluster: RayCluster,
    bucket: str,
    s3_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "catalog"
    catalog = write_catalog(folder, SHIPPED)
    ship_files(folder)
    hidden = ("unshare", "--mount", "sh", "-c", HIDE, str(folder))
    caches = {name: {"XDG_CACHE_HOME": str(tmp_path / f"cache of {name}")} for name in (V3, V4)}
    private_cluster.start(num_cpus=2, classes=[V4], before=hidden, environ=caches[V4])
    unreachable = {**caches[V3], "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    cut_off = private_cluster.start(num_cpus=1, classes=[V3], environ=unreachable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of the driver"))
    script = ROOT / "tests" / "support" / "drive.py"
    words = (script, catalog, bucket, f"sqlite:///{tmp_path}/mlflow.db", "far")
    command = [sys.executable, "-u", *map(str, words), str(tmp_path / "out.json"), V3, V4]
    refused = private_cluster.run(command)
    assert "StoreUnreachableError" in refused.stdout, "the message of the node"
    cut_off.stop()
    private_cluster.start(num_cpus=1, classes=[V3], before=hidden, environ=caches[V3])
    first = Driver(private_cluster.popen(command))
    first.wait_for("built good")
    first.kill()
    again = Driver(private_cluster.popen(command))
    assert again.end() == 0, again.output
    assert first.built.keys().isdisjoint(again.built), "nothing is built twice"
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    verdicts = {(item["model"], item["device_class"]): item["verdict"] for item in outcomes}
    assert len(verdicts) == 6
    assert set(verdicts.values()) <= {"published", "kept-eager", "unstable"}
    for name in ("good", "file"):
        assert verdicts[name, "portable"] == "published"
        assert Store.open(bucket).version(name).number == 1
    assert freezer.load("file", store=bucket)(torch.ones(4, 16)).shape == (4, 16)
    names = [name.split("/") for name in objects(s3_address, bucket.removeprefix("s3://"))]
    work = {parts[1] for parts in names if parts[0] == ".coldpress"}
    assert work == {"candidates", "ledger", "logs", "sources", "weights"}
    for name in (V3, V4):
        (node,) = (tmp_path / f"cache of {name}" / "coldpress" / "work").iterdir()
        assert (node / ".coldpress" / "sources").is_dir(), "the sources came through the bucket"
        assert list((node / ".coldpress" / "staging").iterdir()) == []
        assert not (node / ".coldpress" / "candidates").exists()
