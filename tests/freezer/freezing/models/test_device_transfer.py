"""Models on another device: `meta` shows what was moved, `cpu:0` computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from freezer.freezing.models.calls import device_of_model, model_on
from freezer.freezing.models.exported_program import module_of
from freezer.runtime.devices import CPU, called_on
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from tests.models import Mlp, seeded

META = torch.device("meta")


class Holding(nn.Module):
    """Tensors in every place that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(2, 2), nn.Buffer(torch.ones(2))
        self.plain = torch.ones(2)
        self.several: Any = [torch.ones(2), {"deep": (torch.ones(2), 1)}]
        self.texts = ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.shift + self.plain + self.several[0]
        return out


def test_model_on_moves_all_tensors() -> None:
    model: Any = seeded(Holding)
    moved: Any = model_on(model, META)
    deep = moved.several[1]["deep"][0]
    found = {tensor.device.type for tensor in (moved.linear.weight, moved.shift, moved.plain, moved.several[0], deep)}
    assert found == {"meta"}
    assert moved.several[1]["deep"][1] == 1
    assert moved(torch.ones(2, device="meta")).is_meta
    assert device_of_model(moved) == META
    assert {tensor.device.type for tensor in (model.linear.weight, model.plain, model.several[0])} == {"cpu"}
    assert device_of_model(nn.ReLU()) == CPU
    assert device_of_model(nn.ReLU(), [torch.ones(1, device="meta")]) == META
    assert device_of_model(model, [torch.ones(1, device="meta")]) == CPU


def test_model_on_moves_torchscript_constants() -> None:
    with torchscript_deprecations_silenced(), torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(seeded(Holding), torch.ones(2)))
    assert not list(traced.parameters())
    apart = torch.device("cpu", 0)
    moved = model_on(traced, apart)
    assert moved is not traced
    assert torch.equal(moved(torch.ones(2)), traced(torch.ones(2)))
    assert moved(torch.ones(2)).is_cpu


def test_model_on_renames_devices_in_graphs() -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(2, device=x.device)

    program = torch.export.export(Making().eval(), (torch.ones(2),), strict=False)
    moved = model_on(module_of(program), META)
    assert moved(torch.ones(2, device="meta")).is_meta


def test_called_on_moves_arguments_and_results() -> None:
    model = seeded(Mlp)
    assert called_on(model, CPU) is model
    seen: list[torch.device] = []

    def elsewhere(x: Tensor, *, pair: list[Tensor]) -> dict[str, Tensor]:
        seen.extend((x.device, pair[0].device))
        return {"y": torch.ones(2)}

    assert called_on(elsewhere, META)(torch.ones(2), pair=[torch.ones(2)])["y"].is_cpu
    assert seen == [META, META]
