"""Open models in forks, in threads, and in the contexts of their callers."""

from __future__ import annotations

import os
import select
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact import Artifact, Needs
from freezer.runtime.loaders import LOADERS
from tests.support.steps import HERE, artifact_of, copy_of, quickly

RECIPES = ["torchscript-frozen", "onnxruntime", "openvino", "portable"]


class Net(nn.Module):
    """Returns a constant of its own beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.layers(x) + torch.zeros(1), "table": self.table}


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for recipe in RECIPES:
        folder = tmp_path_factory.mktemp(recipe) / "out"
        device_class = "portable" if recipe == "portable" else HERE
        options: dict[str, Any] = {"num_threads": 2, "device_class": device_class}
        folders[recipe] = artifact_of(quickly(Net(), {"x": X}, folder, recipe, **options)).folder
    return folders


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_after_a_fork_do_not_hang(frozen: dict[str, Path], recipe: str) -> None:
    """Payloads of torch answer; engines, whose threads are gone, raise CP-FROZEN."""
    model = freezer.load(frozen[recipe], threads=2)
    expected = model(x=X)["y"]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = b"right" if torch.equal(model(x=X)["y"], expected) else b"wrong"
        except Exception as error:
            said = getattr(error, "code", repr(error)).encode()
        os.write(write, said)
        os._exit(0)
    ready, _, _ = select.select([read], [], [], 30)
    said = os.read(read, 100) if ready else b"hangs"
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert said == (b"CP-FROZEN" if recipe in ("onnxruntime", "openvino") else b"right")


def test_sixteen_threads_load_at_once(frozen: dict[str, Path]) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = [*frozen.values()] * 4
        models = list(pool.map(freezer.load, folders))
    for model in models:
        assert model.ladder == ()
        assert torch.allclose(model(x=X)["y"], models[0](x=X)["y"], atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_context_of_the_caller_changes_nothing(frozen: dict[str, Path], recipe: str) -> None:
    model = freezer.load(frozen[recipe])
    expected = model(x=X)
    with torch.autocast("cpu", torch.bfloat16):
        answers = [model(x=X)]
    with torch.inference_mode(), torch.device("meta"):
        answers.append(model(x=X))
    torch.set_default_dtype(torch.float64)
    try:
        answers.append(model(x=X))
    finally:
        torch.set_default_dtype(torch.float32)
    for answer in answers:
        assert torch.equal(answer["y"], expected["y"])
        assert answer["y"].dtype is torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_callers_own_what_they_get(frozen: dict[str, Path], recipe: str) -> None:
    """Writes into an answer change no other one, and a later call does not change it."""
    model = freezer.load(frozen[recipe])
    first = model(x=X)
    kept = first["y"].clone()
    model(x=X.flip(0))
    assert torch.equal(first["y"], kept)
    first["table"].add_(7)
    assert model(x=X)["table"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("made_with", "num_lines"), [("1.0", 1), (torch.__version__, 0)])
def test_warnings_about_older_packages_are_one_line(
    frozen: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    made_with: str,
    num_lines: int,
) -> None:
    """A newer torch prints a line for each function that it does not find in a package."""
    made = Artifact.read(frozen["torchscript-frozen"])
    payloads = tuple(replace(item, kind="inductor") for item in made.manifest.payloads)
    copy_of(made, tmp_path / "out", needs=Needs(torch=made_with), payloads=payloads)

    def printing(*args: Any) -> Any:
        os.write(2, b"[WARNING] Could not dlsym one. This is okay if you\n" * 2)
        return LOADERS["torchscript"](*args)

    monkeypatch.setitem(LOADERS, "inductor", printing)
    assert freezer.load(tmp_path / "out", threads=2).ladder == ()
    assert sum("dlsym one" in line for line in caplog.messages) == num_lines
    assert ("dlsym" in capfd.readouterr().err) == (num_lines == 0)
