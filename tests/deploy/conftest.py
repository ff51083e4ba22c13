"""A store that the tests of a deployment share: its model is large enough that its speed tells something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetModel

import freezer
from freezer.device_class import PORTABLE, best_level, detect
from freezer.limits import SamplingPolicy
from freezer.store import Store

LEVEL = best_level(detect().classes)
THREADS = len(os.sched_getaffinity(0))


def resnet18() -> torch.nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    model: torch.nn.Module = ResNetModel(config).eval()
    return model


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ResNet-18, frozen by Inductor for this machine's level, and portable."""
    folder = tmp_path_factory.mktemp("resnet")
    x = torch.randn(1, 3, 224, 224)
    policy = SamplingPolicy(time_limit_s=3.0, warmup_s=0.5, min_rounds=2, busy_limit=2.0, steal_limit=2.0)
    artifacts = {}
    for name, recipe in ((str(LEVEL), "inductor-frozen"), (PORTABLE, "auto")):
        out, speedup_min = folder / name, freezer.Limits(speedup_min=0.01)
        frozen = freezer.freeze(
            *(resnet18(), {"pixel_values": x}),
            out=out,
            name="resnet18",
            recipes=[recipe],
            device_class=name,
            num_threads=THREADS,
            limits=speedup_min,
            policy=policy,
        )
        assert frozen.artifact is not None, frozen.reason
        artifacts[name] = frozen.artifact
    Store.open(str(folder / "store"), create=True).publish("resnet18", source_key="test", artifacts=artifacts, carried={})
    return folder / "store"
