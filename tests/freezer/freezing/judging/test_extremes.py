"""Values, sizes and ways to call that normal inputs never have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import freezer
from freezer.freezing.freeze import FreezeOptions, freeze
from freezer.freezing.judging import Judgement
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import Dim
from tests.support.models import Calling
from tests.support.models_torchscript import LateState
from tests.support.steps import ANY_SPEED, QUICK, judgement_in_place


class Masked(Calling):
    """The same with a mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return self.function(x, mask)


LENGTH = {"x": {1: Dim(name="length", min=2, max=64)}}
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[True, True, False, False, False, False, False, False]] * 2)


def judged(
    right: nn.Module, served: nn.Module, folder: Path, inputs: dict[str, Tensor], **options: Any
) -> Judgement:
    return judgement_in_place(right, served, inputs, folder, "torchscript-exact", **options)


def attend(x: Tensor, mask: Tensor, lowest: float) -> Tensor:
    """Softmax over masked scores; with a finite lowest value, an empty row averages all."""
    return x.masked_fill(~mask, lowest).softmax(-1).nan_to_num() @ x.mT


def odd_tail(x: Tensor) -> Tensor:
    """The last column is wrong at sizes just above a multiple of 16."""
    if x.shape[1] % 16 == 3:
        return torch.cat([x[:, :-1] * 2, x[:, -1:]], 1)
    return x * 2


Model = Callable[..., Tensor]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(F.logsigmoid, lambda x: torch.log(torch.sigmoid(x)), id="log space"),
        pytest.param(torch.expm1, lambda x: torch.exp(x) - 1, id="small values"),
        pytest.param(lambda x: x.clamp(-50, 50), lambda x: x.clamp(-9, 50), id="clipped"),
        pytest.param(lambda x: x / x.abs().max(), lambda x: x / (x.abs().max() + 1e-7), id="zeros"),
    ],
)
def test_wrong_extreme_values_are_rejected(right: Model, wrong: Model, tmp_path: Path) -> None:
    found = judged(Calling(right), Calling(wrong), tmp_path, {"x": X})
    assert found.verdict == "rejected", found.reason


def test_row_without_keys_is_tried(tmp_path: Path) -> None:
    found = judged(
        Masked(lambda x, mask: attend(x, mask, -torch.inf)),
        Masked(lambda x, mask: attend(x, mask, -1e9)),
        tmp_path,
        {"x": X, "mask": MASK},
    )
    assert found.verdict == "rejected", found.reason


class Reader(nn.Module):
    """A transformer layer, whose fused form makes NaN of an empty mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x[..., None].expand(-1, -1, 8), src_key_padding_mask=~mask)


def test_numbers_of_parts_serve_where_fused_layers_make_nan(tmp_path: Path) -> None:
    model, none = Reader().eval(), torch.zeros_like(MASK)
    with torch.no_grad():
        assert model(X, none).isnan().all()
    options = FreezeOptions(
        device_class="portable", recipes=["portable"], limits=ANY_SPEED, policy=QUICK, num_threads=1
    )
    result = freeze(model, {"x": X, "mask": MASK}, out=tmp_path / "out", options=options)
    assert result.verdict == "published", result.reason
    served = freezer.load(tmp_path / "out")(x=X, mask=none)
    assert served.isfinite().all()


def test_sizes_beside_a_multiple_of_16_are_tried(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        scripted = torch.jit.script(odd_tail)
    found = judged(
        Calling(lambda x: x * 2),
        Calling(lambda x: scripted(x)),
        tmp_path,
        {"x": X},
        dims=LENGTH,
    )
    assert found.verdict == "rejected", found.reason


@pytest.mark.parametrize("limits", [ANY_SPEED, replace(ANY_SPEED, nan="keep")])
def test_lost_nan_is_reported_or_refused(limits: Any, tmp_path: Path) -> None:
    found = judged(
        Calling(F.relu),
        Calling(lambda x: torch.where(x > 0, x, 0.0)),
        tmp_path,
        {"x": X},
        limits=limits,
    )
    if limits.nan == "keep":
        assert found.verdict == "rejected"
    else:
        assert found.winner is not None, found.reason
        assert any("NaN" in warning for warning in found.winner.candidate.warnings)


def test_state_that_shows_late_is_rejected(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        stateful = torch.jit.script(LateState())
        found = judged(Calling(lambda x: x * 2), stateful, tmp_path, {"x": X})
    assert found.verdict == "rejected", found.reason


def test_harmless_rewrites_are_published(tmp_path: Path) -> None:
    """Sums in another order, at any size, with values that saturate and overflow."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def right(x: Tensor) -> dict[str, Tensor]:
        h = (x.sum(1, keepdim=True) * weight[0]).softmax(-1)
        return {"h": h, "exp": x.exp(), "rank": (h @ weight).argmax(-1), "norm": F.normalize(x)}

    def served(x: Tensor) -> dict[str, Tensor]:
        h = (weight[0] * x.flip(1).sum(1, keepdim=True)).log_softmax(-1).exp()
        ranked = h[:, 32:] @ weight[32:] + h[:, :32] @ weight[:32]
        return {"h": h, "exp": x.exp(), "rank": ranked.argmax(-1), "norm": F.normalize(x)}

    found = judged(Calling(right), Calling(served), tmp_path, {"x": X}, dims=LENGTH)
    assert found.verdict == "published", found.reason
