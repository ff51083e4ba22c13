"""A store that the tests of a deployment share: its model is large enough that its speed tells something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetModel

import freezer
from freezer.artifact.folder import Artifact
from freezer.hardware.device_classes import PORTABLE, best_level
from freezer.hardware.machine import detect
from freezer.limits import SamplingPolicy
from freezer.store.store import Store

LEVEL = best_level(detect().classes)
THREADS = 1
"""Of the shared artifacts: on a busy machine several threads wait for each other at every operation, and hide all that is timed."""


def resnet18() -> torch.nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    model: torch.nn.Module = ResNetModel(config).eval()
    return model


def frozen_for(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    out: Path,
    device_class: str,
    recipe: str,
    *,
    name: str,
    num_threads: int,
) -> Artifact:
    """The artifact of a model for a class; timed for long enough that its speedup says something, on a busy machine too."""
    found = freezer.freeze(
        *(model, inputs),
        out=out,
        options=freezer.FreezeOptions(
            name=name,
            recipes=[recipe],
            device_class=device_class,
            num_threads=num_threads,
            limits=freezer.Limits(speedup_min=0.01),
            policy=SamplingPolicy(time_limit_s=3.0, warmup_s=0.5, min_rounds=1, busy_limit=2.0, steal_limit=2.0),
        ),
    )
    assert found.artifact is not None, found.reason
    return found.artifact


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ResNet-18, frozen by Inductor for this machine's level, and portable."""
    folder = tmp_path_factory.mktemp("resnet")
    inputs = {"pixel_values": torch.randn(1, 3, 224, 224)}
    artifacts = {
        name: frozen_for(resnet18(), inputs, folder / name, name, recipe, name="resnet18", num_threads=THREADS)
        for name, recipe in ((str(LEVEL), "inductor-frozen"), (PORTABLE, "auto"))
    }
    Store.open(str(folder / "store"), create=True).publish("resnet18", source_key="test", artifacts=artifacts, carried={})
    return folder / "store"
