"""Artifacts of this machine on a Haswell without AVX-512, emulated by qemu-x86_64."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from freezer.artifact import Artifact
from freezer.hardware import detect, device_class
from freezer.store import Store
from tests.conftest import Frozen, frozen
from tests.support.commands import Done, finished
from tests.support.models import TinyConv, seeded
from tests.support.raylets import ROOT
from tests.support.steps import HERE, python, random_inputs

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
THREADS = torch.get_num_threads()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("qemu-x86_64") is None,
        reason="no qemu-x86_64 (Debian: apt-get install qemu-user)",
    ),
    pytest.mark.skipif(
        V4 not in detect({}).classes or HERE != V4, reason="this process cannot build for x86-64-v4"
    ),
]

FREEZE = """
import sys
from pathlib import Path
from tests.conftest import frozen
from tests.support.commands import Done, finished
from tests.support.models import TinyConv, seeded
from tests.support.steps import random_inputs
x = random_inputs(2, 3, 16, 16)
out, name = sys.argv[1:]
frozen(
    seeded(TinyConv), x, Path(out), name="conv", recipe="inductor-frozen", device_class=name
)
"""

DEPLOY = """
import json, sys
import torch
import freezer
from freezer.errors import IncompatibleError
full, few, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
models = [freezer.load("conv", store=store, threads=threads) for store in (full, few)]
try:
    freezer.load("conv", store=full, device_class="cpu-x86-64-v4", threads=threads)
except IncompatibleError as error:
    refused = str(error)
answers = [model(torch.ones(2, 3, 16, 16)).tolist() for model in models]
classes = [model.manifest.device_class for model in models]
print(json.dumps({"classes": classes, "answers": answers, "refused": refused}))
"""


def on_haswell(code: str, *args: object) -> Done:
    """Run code in a new interpreter on the emulated CPU, without core dumps."""
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", code, *map(str, args)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return finished("sh", "-c", 'ulimit -c 0; exec "$@"', "sh", *command, env=environ, cwd=ROOT)


@pytest.fixture(scope="module")
def artifacts(inductor: Frozen, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """The same convnet for three classes; the one for v3 is built and judged in a process with that
    class's limits.
    """
    folder = tmp_path_factory.mktemp("three-classes")
    limited = {**os.environ, **device_class(V3).limits, "PYTHONPATH": str(ROOT)}
    python(FREEZE, folder / "v3", V3, env=limited, timeout_s=500)
    x = random_inputs(2, 3, 16, 16)
    plain = frozen(
        seeded(TinyConv),
        x,
        folder / "portable",
        name="conv",
        recipe="portable",
        device_class="portable",
    )
    return {V4: inductor.artifact, V3: Artifact.read(folder / "v3"), "portable": plain.artifact}


def test_the_loader_chooses_the_emulated_cpus_best_class(
    artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    """From a store with all three classes, and from one without v3; v4 is refused."""
    stores = []
    for name, classes in (("full", (V4, V3, "portable")), ("few", (V4, "portable"))):
        store = Store.open(str(tmp_path / name), create=True)
        store.publish("conv", source_key="key", artifacts=[artifacts[at] for at in classes])
        stores.append(store.root)
    done = on_haswell(DEPLOY, *stores, THREADS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["classes"] == [V3, "portable"]
    expected = seeded(TinyConv)(torch.ones(2, 3, 16, 16)).detach()
    for answer in found["answers"]:
        torch.testing.assert_close(torch.tensor(answer), expected)
    assert V4 in found["refused"]
    assert V3 in found["refused"], "the class of the machine"
