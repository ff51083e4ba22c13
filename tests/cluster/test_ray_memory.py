"""A node that runs low on memory: Ray's monitor kills the worker, and the item is retried with more
memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import MODELS, outcomes, watched
from tests.support.raylets import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ABOVE_BYTES = 3_000_000_000
"""Ray kills a worker when this much more memory is used than at the start."""

LIMIT_GB = 8
"""The limit of the item, which it does not reach."""


def test_an_item_killed_by_rays_memory_monitor_is_retried(
    private_cluster: RayCluster, tmp_path: Path
) -> None:
    memory = psutil.virtual_memory()
    if memory.available < 2 * LIMIT_GB * 10**9:
        pytest.skip(f"needs {2 * LIMIT_GB} GB of free memory")
    folder = tmp_path / "greedy"
    folder.mkdir()
    shutil.copy(MODELS, folder)
    flag = folder / "flag"
    flag.write_text("eat")
    (folder / "catalog.yaml").write_text(f"""
defaults: {{device_classes: [portable], limits: {{memory_gb: {LIMIT_GB}}}}}
models:
  - name: greedy
    source: python:campaign_models:good_until
    inputs: [{{shape: [2, 16]}}]
    args: {{flag: {flag}}}
""")
    threshold = (memory.total - memory.available + ABOVE_BYTES) / memory.total
    monitor = {
        "RAY_memory_usage_threshold": f"{threshold:.3f}",
        "RAY_memory_monitor_refresh_ms": "50",
    }
    private_cluster.start(
        num_cpus=1,
        classes=["portable"],
        environ=monitor,
        options=[f"--memory={2 * LIMIT_GB * 10**9}"],
    )

    def run() -> tuple[str, dict[str, Any]]:
        output = private_cluster.run(watched(folder)).stdout
        return output, outcomes(folder)["greedy", "portable"]

    output, outcome = run()
    assert f"attempt 2 of 2, with {2 * LIMIT_GB}.0 GB" in output, output
    assert outcome["verdict"] == "failed", output
    assert outcome["reason"].startswith("CP-MEMORY-NODE: OutOfMemoryError: "), outcome
    commands = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in " ".join(command)]
    flag.unlink()
    output, outcome = run()
    assert outcome["verdict"] == "published", output
