"""All classes have the weights of the first load. ATen's capabilities stand for platforms: with
each, torch draws other normal numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from freezer.hardware import device_class

CLASSES = ("portable", "cpu-x86-64-v3")

MODELS = """
import os, pathlib, time, torch
from torch import nn

HERE = pathlib.Path(__file__).parent

class Model(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        table = torch.full((16,), 1 + 1e-6 * len(os.environ["ATEN_CPU_CAPABILITY"]))
        self.register_buffer("table", table, persistent=False)

    def forward(self, input):
        return super().forward(input) + self.table

def drawn():
    '''The first two loads end at the same time.'''
    (HERE / f"loads-{os.getpid()}").touch()
    for _ in range(1000):
        if len(list(HERE.glob("loads-*"))) >= 2:
            break
        time.sleep(0.1)
    model = Model()
    model.weight.data.normal_()
    return model
"""

WORKER = """
import sys
from dataclasses import replace
from pathlib import Path
from freezer.freezing.candidates import Candidate
from freezer.freezing.sources import parse_source
from pipeline.worker import BuildRequest, build
from pipeline.workspace import workplace
from tests.support.campaigns import good_entry

if __name__ == "__main__":
    folder, name = sys.argv[1:]
    source = parse_source(
        "python:shared_models:drawn", folder=Path(folder), search_path=(folder,)
    )
    (built,) = build(
        BuildRequest(
            entry=replace(good_entry(), source=source, search_path=(folder,)),
            builds={"torchscript-frozen": name},
            device_class=name,
            threads=(1,),
            store="store",
            source="drawn",
        )
    )
    assert built.failure is None, built.failure
    made = workplace("store").folder("candidates", built.key)
    assert workplace("store").bring("candidates", built.key, made)
    print(Candidate.read(made).weights)
"""
"""Builds for a class; prints the digest of the weights."""


def test_two_workers_at_once_share_weights(tmp_path: Path) -> None:
    (tmp_path / "shared_models.py").write_text(MODELS)
    (tmp_path / "worker.py").write_text(WORKER)
    workers = []
    for name in CLASSES:
        command = [sys.executable, "worker.py", str(tmp_path), name]
        limits = {"ATEN_CPU_CAPABILITY": "default", **device_class(name).limits}
        workers.append(
            subprocess.Popen(command, env=os.environ | limits, cwd=tmp_path, stdout=subprocess.PIPE)
        )
    first, second = (worker.communicate()[0] for worker in workers)
    assert first == second
    assert first.startswith(b"sha256:"), first
