"""`coldpress verify --speed` where it matters: a convnet whose packed weights are for another instruction set or thread count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import MobileNetV2Config, MobileNetV2Model

from freezer.artifact.folder import Artifact
from freezer.hardware.device_classes import PORTABLE
from freezer.store.store import Store
from tests.deploy.conftest import LEVEL, THREADS, frozen_for
from tests.steps import copy_of, python

pytestmark = [pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better"), pytest.mark.slow]

LOWER = {"cpu-x86-64-v4": "AVX2", "cpu-x86-64-v3": "SSE41"}.get(str(LEVEL), "SSE41")
"""What oneDNN is limited to, below what the weights are packed for."""

QUICKLY = """
import sys
from freezer.limits import SamplingPolicy
SamplingPolicy.__init__.__kwdefaults__.update(time_limit_s=4, warmup_s=0.5, min_rounds=2, busy_limit=2.0, steal_limit=2.0)
"""
"""Times quickly, and takes a busy machine for a quiet one."""

COMMAND = QUICKLY + "from freezer.cli import main; main()"

LATCHED = (
    QUICKLY
    + """
import os
import torch
torch.nn.functional.conv2d(torch.zeros(1, 16, 8, 8), torch.zeros(16, 16, 3, 3))
del os.environ["ONEDNN_MAX_CPU_ISA"]
import freezer
from freezer.errors import SpeedError
try:
    found = freezer.verify("resnet18", store=sys.argv[1], threads=int(sys.argv[2]), speed=True)
except SpeedError as error:
    print(error.check.measured / error.check.expected)
    print(error)
else:
    print(found)
"""
)
"""oneDNN keeps what it read before its first operation, though the environment says nothing of it any more."""


def coldpress(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **(env or {})})


def test_what_was_made_for_this_machine_is_as_fast_as_promised(store: Path) -> None:
    for _ in range(3):  # the best of three
        done = coldpress("verify", "resnet18", "--speed", "--store", store, "--threads", THREADS)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    found = re.search(r"speed: ([\d.]+) times as fast as portable here \(([\d.]+) to ([\d.]+); .*; by the manifests ", done.stdout)
    assert found, done.stdout
    measured, low, high = (float(figure) for figure in found.groups())
    assert low <= measured <= high


def test_an_instruction_set_that_the_weights_are_not_packed_for_is_caught(store: Path) -> None:
    share, message = python(LATCHED, store, THREADS, env={**os.environ, "ONEDNN_MAX_CPU_ISA": LOWER}).split("\n", 1)
    assert float(share) < 0.25, "the cliff is 10 to 30 times"
    assert f"ISA limit: the process was started with ONEDNN_MAX_CPU_ISA={LOWER}; ONEDNN_MAX_CPU_ISA unset now" in message
    assert re.search(r"ISA limit: oneDNN uses .*(SSE4|AVX2).* in this process", message), message
    assert "answers right, at less than half of its speed" in message


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_another_thread_count_than_the_weights_are_packed_for_is_caught(tmp_path: Path) -> None:
    """The manifest is made to say one thread, so that nothing refuses; the payload was made for two. A MobileNet shows it best."""
    torch.manual_seed(0)
    model = MobileNetV2Model(MobileNetV2Config(image_size=224)).eval()
    inputs = {"pixel_values": torch.randn(1, 3, 224, 224)}
    artifacts = [
        frozen_for(model, inputs, tmp_path / name, name, recipe, name="mobilenet", num_threads=2)
        for name, recipe in ((str(LEVEL), "inductor-frozen"), (PORTABLE, "auto"))
    ]
    payloads = tuple(replace(item, num_threads=1) for item in artifacts[0].manifest.payloads)
    forced = copy_of(artifacts[0], tmp_path / "forced", payloads=payloads)
    done = coldpress("verify", forced.folder, "--speed", "--portable", artifacts[1].folder, "--threads", 1)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("CP-SPEED: mobilenet for ")
    assert "threads: 1 here, 2 where it was judged" in done.stderr


def test_a_limit_that_takes_the_class_away_is_the_answer_and_nothing_is_timed(store: Path, tmp_path: Path) -> None:
    pulled: Artifact = (opened := Store.open(str(store))).pull(opened.version("resnet18"), str(LEVEL), tmp_path / "pulled")
    for arguments in (("resnet18", "--store", store), (pulled.folder, "--store", store)):
        done = coldpress("verify", *arguments, "--speed", "--threads", THREADS, env={"ONEDNN_MAX_CPU_ISA": LOWER})
        assert done.returncode == 1, done.stdout
        assert f"ONEDNN_MAX_CPU_ISA={LOWER} limits this process" in done.stderr
        assert "speed:" not in done.stdout
