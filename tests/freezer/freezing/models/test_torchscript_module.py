"""Wrappers that make another method of a ScriptModule its forward."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from freezer.freezing.models.loaders import with_forward
from freezer.runtime.loaders import torchscript_deprecations_silenced

X = torch.ones(1, 4)


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
        out: Tensor = self.linear(x)
        return out

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
