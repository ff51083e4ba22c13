"""All classes have the weights of the first load. ATen's capabilities stand for platforms: with
each, torch draws other normal numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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

def own_generator():
    with torch.random.fork_rng():
        model = Model()
    model.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    return model

def read():
    with torch.random.fork_rng():
        model = Model()
    model.weight.data.fill_(0.25)
    model.bias.data.zero_()
    return model
"""

WORKER = """
import json, sys
from dataclasses import replace
from pathlib import Path
from freezer.freezing.candidates import Candidate
from freezer.freezing.sources import parse_source
from pipeline.worker import BuildRequest, build
from pipeline.workspace import workplace
from tests.support.campaigns import good_entry

if __name__ == "__main__":
    folder, store, factory, name = sys.argv[1:]
    source = parse_source(
        f"python:shared_models:{factory}", folder=Path(folder), search_path=(folder,)
    )
    (built,) = build(
        BuildRequest(
            entry=replace(good_entry(), source=source, search_path=(folder,)),
            builds={"torchscript-frozen": f"{factory}-{name}"},
            device_class=name,
            num_threads=1,
            store=store,
            source=factory,
        )
    )
    found = {"code": "", "weights": ""}
    if built.failure:
        found |= {"code": built.failure.code, "message": built.failure.message}
    else:
        made = workplace(store).folder("candidates", built.key)
        assert workplace(store).bring("candidates", built.key, made)
        found["weights"] = Candidate.read(made).weights
    print(json.dumps(found, sort_keys=True))
"""
"""Builds for a class; prints the digest of the weights, or the failure."""


def both(folder: Path, factory: str, store: str = "store") -> list[dict[str, Any]]:
    """What two workers find that build at the same time, sorted by what they print."""
    (folder / "shared_models.py").write_text(MODELS)
    (folder / "worker.py").write_text(WORKER)
    workers = []
    for name in CLASSES:
        command = [sys.executable, "worker.py", str(folder), store, factory, name]
        limits = {"ATEN_CPU_CAPABILITY": "default", **device_class(name).limits}
        workers.append(
            subprocess.Popen(command, env=os.environ | limits, cwd=folder, stdout=subprocess.PIPE)
        )
    return [json.loads(text) for text in sorted(worker.communicate()[0] for worker in workers)]


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_two_workers_at_once_share_weights(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = "store" if kind == "folder" else request.getfixturevalue("bucket")
    first, second = both(tmp_path, "drawn", store)
    assert first == second
    assert first["weights"], first


def test_computed_buffers_are_shared_without_parameters(tmp_path: Path) -> None:
    first, second = both(tmp_path, "read")
    assert first == second
    kept = tmp_path.glob("store/.coldpress/weights/*/tensors.pt")
    assert max(path.stat().st_size for path in kept) < 3000, "only buffers: nothing was drawn"


def test_weights_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    first, refused = both(tmp_path, "own_generator")
    assert (first["code"], refused["code"]) == ("", "CP-WEIGHTS-DIFFER")
    for named in (first["weights"], *CLASSES, "load the weights from a file"):
        assert named in refused["message"]
