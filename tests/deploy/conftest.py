"""A store for the tests of deployments, with a model that is large enough for its speed to be
measured.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetModel

import freezer
from freezer.artifact import Artifact
from freezer.hardware import PORTABLE, best_level, detect
from freezer.spec import SamplingPolicy
from freezer.store import Store

LEVEL = best_level(detect().classes)
THREADS = 1
"""For the shared artifacts: on a busy machine several threads wait for each other, and the times
say nothing.
"""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ResNet-18, frozen by Inductor for this machine's level, and portable; timed for
    long enough on a busy machine.
    """
    folder = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
    )
    model, artifacts = ResNetModel(config).eval(), list[Artifact]()
    for device_class, recipe in ((str(LEVEL), "inductor-frozen"), (PORTABLE, "auto")):
        options = freezer.FreezeOptions(
            name="resnet18",
            recipes=[recipe],
            device_class=device_class,
            num_threads=THREADS,
            limits=freezer.Limits(speedup_min=0.01),
            policy=SamplingPolicy(
                time_limit_s=3.0, warmup_s=0.5, min_rounds=1, busy_limit=2.0, steal_limit=2.0
            ),
        )
        inputs = {"pixel_values": torch.randn(1, 3, 224, 224)}
        found = freezer.freeze(model, inputs, out=folder / device_class, options=options)
        assert found.artifact is not None, found.reason
        artifacts.append(found.artifact)
    store = Store.open(str(folder / "store"), create=True)
    store.publish("resnet18", source_key="test", artifacts=artifacts)
    return folder / "store"
