"""Is a new artifact worse than the one before?"""

from __future__ import annotations

import pytest

from freezer.artifact import SpeedChange, regression_kind

SAME_ROUNDS: dict[str, float] = {}
CAMPAIGNS = {"noise": 0.05}


@pytest.mark.parametrize(
    ("speed", "rule", "ratios", "worse"),
    [
        ((0.97, 0.95, 0.99), SAME_ROUNDS, (1.0, 1.0), "slower"),
        ((0.97, 0.95, 1.01), SAME_ROUNDS, (1.0, 1.0), None),
        ((0.96, 0.94, 0.98), CAMPAIGNS, (1.0, 1.0), None),
        ((0.94, 0.92, 0.98), CAMPAIGNS, (1.0, 1.0), "slower"),
        ((1.00, 0.98, 1.02), SAME_ROUNDS, (1.2, 2.5), "drifted"),
        ((1.05, 1.02, 1.08), SAME_ROUNDS, (1.2, 2.5), None),
        ((1.04, 1.02, 1.06), CAMPAIGNS, (1.2, 2.5), "drifted"),
        ((1.06, 1.02, 1.08), CAMPAIGNS, (1.2, 2.5), None),
        ((1.00, 0.98, 1.02), SAME_ROUNDS, (0.3, 1.9), None),
        ((1.00, 0.98, 1.02), SAME_ROUNDS, (1.2, None), None),
        (None, SAME_ROUNDS, (1.2, 2.5), "drifted"),
    ],
)
def test_what_counts_as_worse(
    speed: tuple[float, float, float] | None,
    rule: dict[str, float],
    ratios: tuple[float, float | None],
    worse: str | None,
) -> None:
    """Each rule has its own margin: in the same rounds none, between campaigns five percent."""
    change = None
    if speed is not None:
        value, low, high = speed
        change = SpeedChange(value=value, low=low, high=high, **rule)
    assert regression_kind(change, *ratios) == worse
