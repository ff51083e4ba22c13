"""Random numbers: the same bits everywhere, and the distributions that they should have."""

from __future__ import annotations

import sys

import pytest

from tests.support.commands import output
from tests.support.generated_sets import GOLDEN


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_generated_sets_are_golden(capability: str) -> None:
    """torch.randn gives other bits with each of these; Arm's were compared under emulation."""
    command = f"ATEN_CPU_CAPABILITY={capability} {sys.executable} -m tests.support.generated_sets"
    assert output("sh", "-c", command) == GOLDEN.read_text()
