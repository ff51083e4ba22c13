"""Random numbers: the same bits everywhere, and the distributions that they should have."""

from __future__ import annotations

import math
import sys

import pytest

from freezer.runtime.draws import Draws
from tests.support.commands import output
from tests.support.generated_sets import GOLDEN


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_generated_sets_are_golden(capability: str) -> None:
    """torch.randn gives other bits with each of these; Arm's were compared under emulation."""
    command = f"ATEN_CPU_CAPABILITY={capability} {sys.executable} -m tests.support.generated_sets"
    assert output("sh", "-c", command) == GOLDEN.read_text()


def test_normal_numbers_are_nearly_normal() -> None:
    x = Draws(0).normal((1000, 1000))
    assert len(x.unique()) > 900_000, "all bits of the mantissa are drawn"
    for size in (0, 1, 2, 3):
        share = int((x > size).sum()) / 1e6
        assert share == pytest.approx(math.erfc(size / math.sqrt(2)) / 2, rel=0.3)


def test_integers_cover_their_ranges() -> None:
    counts = (Draws(0).integers(-3, 4, (7000,)) + 3).bincount()
    assert len(counts) == 7
    assert counts.min() > 850
