"""ScriptModules: named devices, and wrappers of methods."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import SourceError
from freezer.freezing.models import load_source
from freezer.freezing.models.torchscript_module import named_devices, with_forward
from freezer.freezing.sources import parse_source
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.lines import place_of

X = torch.ones(1, 4)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(1, device="cuda:0")


class MadeForGpu(nn.Module):
    """Names devices in every way that a graph keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.device = torch.device("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":  # compared, not named
            return x
        y: Tensor = self.inner(x)
        z: Tensor = y.to(self.device)
        return y.cuda() + z.to("cpu")


class Answer(NamedTuple):
    total: Tensor
    calls: Tensor


class ManyMethods(nn.Module):
    """Has state, and methods with arguments and defaults of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: Tensor = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @torch.jit.export
    def scale(
        self,
        x: Tensor,
        by: Tensor | None = None,
        times: int = 3,
        limit: float = math.inf,
        pair: tuple[int, float] = (1, 2.5),
        flag: bool = False,
        text: str = "it's",
    ) -> Answer:
        self.calls.add_(1)
        y = (x if by is None else x * by) * times * pair[0] * pair[1]
        return Answer(y.clamp(max=limit) + self.calls, self.calls)


def scripted(model: nn.Module, folder: Path | None = None) -> torch.jit.ScriptModule:
    """The scripted model; with a folder, saved and loaded."""
    with torchscript_deprecations_silenced():
        module: torch.jit.ScriptModule = torch.jit.script(model.eval())
        if folder is not None:
            torch.jit.save(module, str(folder / "model.pt"))
            module = torch.jit.load(str(folder / "model.pt"))
        return module


@pytest.mark.parametrize("saved", [False, True])
def test_named_devices_have_their_lines(saved: bool, tmp_path: Path) -> None:
    module = scripted(MadeForGpu(), tmp_path if saved else None)
    assert named_devices(module, "cuda") == [
        f"cuda ({place_of(MadeForGpu.forward, '.cuda()')})",
        f"cuda:0 ({place_of(Inner.forward, 'zeros')})",
        f"cuda:1 ({place_of(MadeForGpu.forward, 'self.device')})",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a worker with a GPU takes it")
def test_gpu_file_is_rejected_on_a_cpu(tmp_path: Path) -> None:
    scripted(MadeForGpu(), tmp_path)
    with pytest.raises(
        SourceError,
        match=r"names the device cuda \(test_torchscript_module\.py:\d+: return y\.cuda",
    ):
        load_source(parse_source("torchscript:model.pt", folder=tmp_path))


@pytest.mark.parametrize("saved", [False, True])
def test_with_forward_keeps_types_defaults_and_state(saved: bool, tmp_path: Path) -> None:
    module = scripted(ManyMethods(), tmp_path if saved else None)
    wrapped = with_forward(module, "scale")
    wanted, got = module._c._get_method("scale").schema, wrapped.forward.schema  # type: ignore[attr-defined]
    assert str(got).partition("self, ")[2] == str(wanted).partition("self, ")[2]
    assert not wrapped.training
    assert torch.equal(wrapped(X).total, X * 7.5 + 1)
    assert torch.equal(wrapped(X, by=X * 2, times=1, limit=3.0).total, X * 3 + 2)
    again = copy.deepcopy(wrapped)
    assert float(again(X)[0].mean()) == 10.5
    assert float(wrapped(X)[0].mean()) == 10.5
