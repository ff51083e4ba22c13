"""Clusters of two unlike nodes on this machine, and campaigns for them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freezer.hardware import detect
from tests.support.raylets import ROOT, RayCluster

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
MODELS = ROOT / "tests" / "pipeline" / "models" / "campaign_models.py"


def skip_without_v4() -> None:
    """Skip a test on a lesser CPU than x86-64-v4; the node for v3 only claims to be one."""
    if V4 not in detect().classes:
        pytest.skip("needs a CPU of x86-64-v4")


def write_slow_catalog(folder: Path, names: str, *, seconds: float) -> None:
    """Write a catalog of small models for v3 and v4, one for each letter, that take some seconds to
    load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODELS, folder)
    entries = [
        f'{{name: {name}, source: "python:campaign_models:slow_to_build", args: {{width: {8 + i},'
        f" seconds: {seconds}}}, inputs: [{{shape: [1, {8 + i}]}}]}}"
        for i, name in enumerate(names)
    ]
    defaults = f"{{recipes: [torchscript-frozen], device_classes: [{V3}, {V4}]}}"
    (folder / "catalog.yaml").write_text(f"defaults: {defaults}\nmodels: [{', '.join(entries)}]\n")


def watched(folder: Path, *options: str) -> list[str]:
    """The command of a watched campaign on a folder's catalog; its store and its name are the
    folder's name.
    """
    script = ROOT / "tests" / "support" / "watched.py"
    words = (
        script,
        folder / "catalog.yaml",
        folder / folder.name,
        f"sqlite:///{folder}/mlflow.db",
        folder.name,
        *options,
    )
    return [sys.executable, "-u", *map(str, words)]


@pytest.fixture
def private_cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster without nodes."""
    skip_without_v4()
    with RayCluster(tmp_path / "cluster") as found:
        yield found
