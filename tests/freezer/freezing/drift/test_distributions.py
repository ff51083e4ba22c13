"""Random outputs: candidates with other means, variances or frequencies are rejected, right ones
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.freezing.drift import distribution_problem, sampled
from freezer.freezing.drift.distributions import NUM_RUNS
from tests.support.steps import (
    artifact_of,
    judgement_in_place,
    quickly,
    random_inputs,
)

X = random_inputs(4, 16)


class Noisy(nn.Module):
    """Adds noise of twice the signal's size."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(16, 64), scale

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return h + self.scale * torch.randn_like(h)


class Sampling(Noisy):
    """Samples four tokens of 64, and whether to stop."""

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return torch.multinomial((3 * h).softmax(-1), 4), torch.rand_like(h) < h.sigmoid()


@pytest.mark.parametrize("model", [Noisy, Sampling])
def test_zeroed_weights_within_noise_are_rejected(
    model: Callable[[], Noisy], tmp_path: Path
) -> None:
    zeroed = model()
    for parameter in zeroed.parameters():
        parameter.data.zero_()
    for served, verdict in ((model(), "published"), (zeroed, "rejected")):
        folder = tmp_path / verdict
        folder.mkdir()
        assert judgement_in_place(model(), served, {"x": X}, folder).verdict == verdict


def runs(draw: Callable[[], Tensor], num: int = NUM_RUNS) -> list[Any]:
    return [sampled([[draw()] for _ in range(6)]) for _ in range(num)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(1).expand(500),
        lambda: torch.randn(500).div(torch.randn(500)),
        lambda: 1e9 * (torch.rand(500) < 0.02) + torch.randn(500),
        lambda: torch.randint(5, (500,)),
        lambda: torch.rand(500) < 0.01,
    ],
    ids=["one for all", "Cauchy", "mixed scales", "integers", "rare bools"],
)
def test_equal_distributions_pass(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    assert distribution_problem(["y"], runs(draw), runs(draw)) is None


def test_rounding_of_means_is_allowed() -> None:
    torch.manual_seed(0)
    mean = 10 * torch.randn(20_000)

    def draw(off: float) -> Tensor:
        return mean * (1 + off) + 1e-2 * torch.randn(20_000)

    eager = runs(lambda: draw(0))
    assert distribution_problem(["y"], eager, runs(lambda: draw(3e-6))) is None
    assert "means" in str(distribution_problem(["y"], eager, runs(lambda: draw(1e-3))))


def test_one_wrong_output_of_many_is_found() -> None:
    torch.manual_seed(0)

    def several(wrong: float) -> list[Any]:
        shifts = [0.0] * 7 + [wrong, 0.0, 0.0]
        drawn = []
        for _ in range(NUM_RUNS):
            outputs = [torch.randn(50) + shift for shift in shifts]
            drawn.append(sampled([outputs]))
        return drawn

    names = [f"y{index}" for index in range(10)]
    assert distribution_problem(names, several(0), several(0)) is None
    assert "means of output 'y7'" in str(distribution_problem(names, several(0), several(1)))


def signs(*shape: int) -> Tensor:
    return torch.randint(2, shape) * 2.0 - 1.0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda: torch.randn(4, 64), lambda: torch.randn(64).repeat(4, 1)),
        (lambda: torch.randn(8, 64), lambda: torch.randn(2, 64).repeat(4, 1)),
        (lambda: torch.randint(50, (4, 8)), lambda: torch.randint(50, (8,)).repeat(4, 1)),
        (lambda: torch.randn(4, 64, 8), lambda: torch.randn(4, 64, 1).repeat(1, 1, 8)),
        (lambda: torch.randn(4, 64), lambda: signs(4, 64)),
        (
            lambda: torch.randn(64, 4096),
            lambda: torch.randn(64, 4096) * (1 + 3.0 * (torch.arange(4096) % 2)),
        ),
    ],
    ids=["one row", "two rows", "integers", "elements", "signs", "a factor of 4"],
)
def test_equal_means_and_variances_do_not_suffice(
    right: Callable[[], Tensor], wrong: Callable[[], Tensor]
) -> None:
    """One draw for several rows or elements, signs in place of normal noise, and a factor at odd
    places.
    """
    torch.manual_seed(0)
    eager = runs(right)
    assert distribution_problem(["y"], eager, runs(right)) is None
    assert distribution_problem(["y"], eager, runs(wrong)) is not None


def test_shapes_that_vary_are_reported() -> None:
    ones = [sampled([[torch.ones(2 + index)]]) for index in range(NUM_RUNS)]
    assert "shape of output 'y' varies" in str(distribution_problem(["y"], ones, ones))


def test_artifact_that_draws_integers_loads(tmp_path: Path) -> None:
    """The canary does not expect the integers that were drawn for the golden outputs."""
    ids, _ = freezer.load(artifact_of(quickly(Sampling(), [X], tmp_path / "made")).folder)(X)
    assert ids.shape == (4, 4)
