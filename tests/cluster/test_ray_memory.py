"""A node that really runs low on memory: Ray's monitor kills the worker, and the policy of `node-memory` takes it from there."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_two_nodes import MODELS
from tests.raylets import ROOT, RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ABOVE_BYTES, LIMIT_GB = 3_000_000_000, 8
"""What may be used beyond what is used now until Ray kills; and what the item may use at the most, which it does not come to."""


def run(cluster: RayCluster, folder: Path) -> tuple[str, dict[str, str]]:
    """What a campaign says, and its one outcome."""
    script = ROOT / "tests" / "cluster" / "watched.py"
    words = (script, folder / "catalog.yaml", folder / "store", f"sqlite:///{folder}/mlflow.db", "low")
    done = cluster.run([sys.executable, "-u", *(str(word) for word in words)], timeout_s=400)
    (outcome,) = json.loads((folder / "store.json").read_text())["outcomes"]
    return done.stdout, outcome


def test_what_rays_memory_monitor_kills_is_tried_once_with_more_and_ends_as_one_of_memory(
    private_cluster: RayCluster, tmp_path: Path
) -> None:
    if psutil.virtual_memory().available < 2 * LIMIT_GB * 10**9:
        pytest.skip(f"needs {2 * LIMIT_GB} GB of free memory")
    shutil.copy(MODELS, tmp_path)
    flag = tmp_path / "flag"
    flag.write_text("eat")
    (tmp_path / "catalog.yaml").write_text(
        f"defaults: {{device_classes: [portable], limits: {{memory_gb: {LIMIT_GB}}}}}\n"
        'models:\n  - {name: greedy, source: "python:campaign_models:good_until", inputs: [{shape: [2, 16]}], '
        f"args: {{flag: {flag}}}}}\n"
    )
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + ABOVE_BYTES) / memory.total
    monitor = {"RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_memory_monitor_refresh_ms": "50"}
    private_cluster.start(num_cpus=1, classes=["portable"], environ=monitor, options=[f"--memory={2 * LIMIT_GB * 10**9}"])

    said, outcome = run(private_cluster, tmp_path)
    assert "memory: OutOfMemoryError: " in said, said
    assert f"attempt 2 of 2, with {2 * LIMIT_GB}.0 GB kept free" in said, said
    assert outcome["verdict"] == "failed", said
    assert outcome["reason"].startswith("CP-MEMORY-NODE: OutOfMemoryError: "), outcome
    assert outcome["reason"].endswith("tried 2 times"), outcome
    assert not [one.pid for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]

    flag.unlink()
    said, outcome = run(private_cluster, tmp_path)
    assert outcome["verdict"] == "published", said
