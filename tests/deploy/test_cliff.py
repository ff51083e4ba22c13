"""`coldpress verify --speed` on convnets whose packed weights are for another instruction set or
thread count.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.deploy.conftest import LEVEL, THREADS
from tests.support.commands import Done, finished, sampling
from tests.support.steps import python

pytestmark = [
    pytest.mark.skipif(LEVEL is None, reason="needs a CPU of x86-64-v3 or better"),
    pytest.mark.slow,
]

LOWER = {"cpu-x86-64-v4": "AVX2", "cpu-x86-64-v3": "SSE41"}.get(str(LEVEL), "SSE41")
"""A limit for oneDNN below the class of the weights."""

QUICKLY = sampling(4, 0.5, 2)

COMMAND = QUICKLY + "from freezer.cli import main; main()"

LATCHED = (
    QUICKLY
    + """
import os
import sys
import torch
torch.nn.functional.conv2d(torch.zeros(1, 16, 8, 8), torch.zeros(16, 16, 3, 3))
del os.environ["ONEDNN_MAX_CPU_ISA"]
import freezer
from freezer.errors import SpeedError
try:
    freezer.verify("resnet18", store=sys.argv[1], threads=int(sys.argv[2]), speed=True)
except SpeedError as error:
    print(error)
"""
)
"""oneDNN keeps the limit that it read before its first operation, although the environment no
longer has it.
"""


def coldpress(*arguments: object, env: Mapping[str, str] | None = None) -> Done:
    environ = {**os.environ, **(env or {})}
    return finished(sys.executable, "-c", COMMAND, *arguments, env=environ, timeout_s=120)


def test_an_artifact_of_this_machine_is_as_fast_as_recorded(store: Path) -> None:
    for _ in range(3):  # the best of three
        done = coldpress("verify", "resnet18", "--speed", "--store", store, "--threads", THREADS)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"speed: ([\d.]+) times as fast as portable here \(([\d.]+) to ([\d.]+); ", done.stdout
    )
    assert found, done.stdout
    measured, low, high = map(float, found.groups())
    assert low <= measured <= high


def test_weights_for_another_instruction_set_are_detected(store: Path) -> None:
    message = python(LATCHED, store, THREADS, env={**os.environ, "ONEDNN_MAX_CPU_ISA": LOWER})
    found = re.search(r"([\d.]+) times as fast .* by the manifests ([\d.]+) times", message)
    assert found, message
    measured, expected = map(float, found.groups())
    assert measured / expected < 0.25, "the cliff is about 12 times"
    assert "Its results are correct" in message
