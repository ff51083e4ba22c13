"""Proof by emulation: artifacts of this machine on a Haswell without AVX-512, whose every instruction qemu-x86_64 emulates."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from freezer.artifact.folder import Artifact
from freezer.hardware.device_classes import device_class
from freezer.hardware.machine import detect
from freezer.store.store import Store
from tests.conftest import Frozen, frozen
from tests.models import TinyConv, seeded
from tests.steps import HERE, python, random_inputs

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
ROOT = Path(__file__).parents[2]
THREADS = torch.get_num_threads()
QEMU = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64 (Debian: apt-get install qemu-user)"),
    pytest.mark.skipif(V4 not in detect({}).classes or HERE != V4, reason="this process cannot build for x86-64-v4"),
]

FREEZE = """
import sys
from pathlib import Path
from tests.conftest import frozen
from tests.models import TinyConv, seeded
from tests.steps import random_inputs
x = random_inputs(2, 3, 16, 16)
frozen(seeded(TinyConv), x, Path(sys.argv[1]), name="conv", recipe="inductor-frozen", device_class=sys.argv[2])
"""

DEPLOY = """
import json, sys
from pathlib import Path
import torch
import freezer
from freezer.errors import IncompatibleError
full, few, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
x = torch.ones(2, 3, 16, 16)
best, other = (freezer.load("conv", store=store, threads=threads) for store in (full, few))
try:
    freezer.load("conv", store=full, device_class="cpu-x86-64-v4", threads=threads)
except IncompatibleError as error:
    refused = str(error)
print(json.dumps({
    "best": best.manifest.device_class,
    "other": other.manifest.device_class,
    "refused": refused,
    "answers": [model(x).tolist() for model in (best, other)],
}))
"""

OPEN_RAW = """
import sys
import torch
torch.set_num_threads(int(sys.argv[2]))
runner = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
print("opened", flush=True)
(output,) = runner.run([torch.ones(1, 3, 16, 16)])
print("answered", tuple(output.shape), flush=True)
"""

CLASSES = "import sys; from freezer.cli import main; sys.argv = ['coldpress', *sys.argv[1:]]; main()"


def on_a_haswell(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter does on the emulated CPU; no core is dumped."""
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", code, *(str(arg) for arg in args)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", *command],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


@pytest.fixture(scope="module")
def artifacts(inductor: Frozen, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """The same convnet for three classes; the one for v3 is built and judged under that class's limits, in a process of its own."""
    folder = tmp_path_factory.mktemp("three-classes")
    limited = {**os.environ, **device_class(V3).limits, "PYTHONPATH": str(ROOT)}
    python(FREEZE, folder / "v3", V3, env=limited, timeout_s=500)
    x = random_inputs(2, 3, 16, 16)
    plain = frozen(seeded(TinyConv), x, folder / "portable", name="conv", recipe="portable", device_class="portable")
    return {V4: inductor.artifact, V3: Artifact.read(folder / "v3"), "portable": plain.artifact}


def published(artifacts: dict[str, Artifact], folder: Path, *classes: str) -> str:
    store = Store.open(str(folder), create=True)
    store.publish("conv", source_key="key", artifacts={name: artifacts[name] for name in classes}, carried={})
    return str(store.root)


def payload(artifact: Artifact) -> Path:
    """The payload for the first point, of batch 1."""
    return artifact.folder / artifact.manifest.payloads[0].path


@pytest.fixture(scope="module")
def deployed(artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a deployment on the emulated CPU takes and answers, from a store with all three and from one without v3."""
    folder = tmp_path_factory.mktemp("emulated")
    full = published(artifacts, folder / "full", V4, V3, "portable")
    few = published(artifacts, folder / "few", V4, "portable")
    done = on_a_haswell(DEPLOY, full, few, THREADS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_loader_takes_the_best_that_the_emulated_cpu_runs(deployed: dict[str, Any]) -> None:
    """Its canary has compared the golden outputs there; these are the answers to an input that no canary knows."""
    assert (deployed["best"], deployed["other"]) == (V3, "portable")
    expected = seeded(TinyConv)(torch.ones(2, 3, 16, 16)).detach()
    for answer in deployed["answers"]:
        torch.testing.assert_close(torch.tensor(answer), expected)


def test_the_loader_refuses_the_better_class_by_name(deployed: dict[str, Any]) -> None:
    assert V4 in deployed["refused"]
    assert V3 in deployed["refused"], "what the machine is"


def test_a_payload_for_v4_dies_there_and_one_for_v3_answers(artifacts: dict[str, Artifact]) -> None:
    """Opened raw, without the loader that reads JSON first."""
    fine = on_a_haswell(OPEN_RAW, payload(artifacts[V3]), THREADS)
    assert (fine.returncode, fine.stdout.splitlines()[-1:]) == (0, ["answered (1, 10)"]), fine.stderr
    dead = on_a_haswell(OPEN_RAW, payload(artifacts[V4]), THREADS)
    assert dead.returncode in (-signal.SIGILL, 128 + signal.SIGILL), (dead.returncode, dead.stdout, dead.stderr)
    assert "answered" not in dead.stdout
    here = python(OPEN_RAW, payload(artifacts[V4]), THREADS)
    assert here.splitlines()[-1] == "answered (1, 10)", "the payload itself is sound"


def test_the_command_tells_what_the_emulated_cpu_is() -> None:
    """/proc/cpuinfo shows the host's CPU there, with AVX-512."""
    done = on_a_haswell(CLASSES, "classes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == V3
    assert V4 not in lines
    (why,) = (line for line in lines if line.startswith(f"not {V4}"))
    assert "avx512f" in why
    assert "avx512f" in Path("/proc/cpuinfo").read_text()
