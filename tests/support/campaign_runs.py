"""Whole campaigns on a real Ray, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.commands import Done, finished
from tests.support.raylets import ROOT

RAISES = """
defaults: {recipes: [torchscript-frozen], device_classes: [portable]}
models:
  - {name: raises, source: "python:campaign_models:raises", inputs: [{shape: [1, 16]}]}
"""
HANGS = RAISES.replace("raises", "hangs")
"""Catalogs of one model, which fails or does not end."""

ONE_MODEL = """
defaults: {recipes: [torchscript-frozen]}
models:
  - name: good
    source: python:campaign_models:good
    inputs: [{shape: [batch, 16]}]
    dims: {batch: {min: 1, max: 8}}
"""

CATALOG = (
    ONE_MODEL
    + """
  - name: drifting
    source: python:campaign_models:random_weights
    inputs: [{shape: [1, 16]}]
    device_classes: [portable]
  - name: raises
    source: python:campaign_models:raises
    inputs: [{shape: [1, 16]}]
    device_classes: [portable]
  - name: hangs
    source: python:campaign_models:hangs
    inputs: [{shape: [1, 16]}]
    device_classes: [portable]
    limits: {timeout_s: 5}
"""
)
"""A catalog of a good and three bad models."""

SHIPPED = (
    ONE_MODEL
    + """
  - name: file
    source: torchscript:linear.pt
    inputs: {input: {shape: [n, 16]}}
    dims: {n: {min: 2, max: 8}}
    samples: samples.safetensors
"""
)
"""A catalog with files beside it."""


def environment(home: Path) -> dict[str, str]:
    """A home of its own: a local Ray writes a token into it."""
    return {
        **os.environ,
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
    }


def write_catalog(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "pipeline" / "models" / "campaign_models.py", folder)
    path = folder / "catalog.yaml"
    path.write_text(text)
    return path


def drive(folder: Path, campaign: str = "test") -> list[str]:
    """The command of a quick campaign."""
    script = ROOT / "tests" / "support" / "drive.py"
    words = [script, folder / "catalog.yaml", folder / "store", f"sqlite:///{folder}/mlflow.db"]
    return [sys.executable, *map(str, words), campaign, str(folder / "out.json")]


def run(command: list[str], home: Path) -> Done:
    return finished(*command, env=environment(home), cwd=home, timeout_s=400)


def ship_files(folder: Path) -> None:
    """Write the files of SHIPPED."""
    samples = {"0/input": torch.ones(2, 16), "1/input": torch.zeros(8, 16)}
    save_file(samples, folder / "samples.safetensors")
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(torch.nn.Linear(16, 16)), str(folder / "linear.pt"))


def outcomes(folder: Path, name: str = "out") -> dict[tuple[str, str], dict[str, Any]]:
    """The outcomes of a campaign's report, by model and class."""
    report = json.loads((folder / f"{name}.json").read_text())
    return {(item["model"], item["device_class"]): item for item in report["outcomes"]}
