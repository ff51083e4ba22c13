"""Architectures: equal for other weights, different where speed may differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from freezer.freezing.candidates import architecture_digest
from freezer.freezing.target import target_here
from tests.support.models import mlp
from tests.support.steps import BATCH, HERE, subject_of

X = torch.ones(2, 4)


class Own(nn.Sequential):
    """Its description fails, as a user's code may."""

    def extra_repr(self) -> str:
        raise RuntimeError("not described")


def digest(model: nn.Module, points: tuple[Mapping[str, int], ...] = ()) -> str:
    name = "input" if isinstance(model, nn.Sequential) else "x"
    return architecture_digest(
        subject_of(model, {name: X}, {name: {0: BATCH}}, points), target_here(HERE, 1)
    )


def test_weights_do_not_change_the_architecture() -> None:
    one, other = mlp(), mlp()
    other.last.bias.data += 1.0  # type: ignore[operator,union-attr]
    assert digest(one) == digest(other)


def test_what_changes_speed_changes_the_architecture() -> None:
    layers = [
        nn.Sequential(nn.Linear(4, 8), kind)
        for kind in (nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"))
    ]
    models = [
        mlp(),
        Own(nn.Linear(4, 8), nn.ReLU()),
        *layers,
        nn.Sequential(nn.Linear(4, 9), nn.ReLU()),
    ]
    found = [*map(digest, models), digest(mlp(), ({"batch": 2},))]
    assert len(set(found)) == len(found)
