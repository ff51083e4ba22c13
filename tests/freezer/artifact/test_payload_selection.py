"""Selection of payloads by threads and sizes."""

from __future__ import annotations

import pytest

from freezer.artifact import (
    Payload,
    payloads_within,
)
from freezer.spec import Dim
from tests.support.steps import plain_payload


def payload(name: str, num_threads: int | None, batch: tuple[int, int] = (1, 8)) -> Payload:
    dims = (Dim(name="batch", min=batch[0], max=batch[1]),)
    return plain_payload("inductor", num_threads, path=name, dims=dims)


ONE = [payload("batch1-threads1", 1, (1, 1)), payload("all-threads1", 1)]
FOUR = [
    payload("batch1-threads4", 4, (1, 1)),
    payload("batch8-threads4", 4, (8, 8)),
    payload("all-threads4", 4),
]
BOTH = [*FOUR, *ONE]
ANY = payload("all", None)
CAPTURED = payload("captured", None, (5, 8))


@pytest.mark.parametrize(
    ("held", "budget", "expected"),
    [
        (BOTH, 1, ONE),
        (BOTH, 3, ONE),
        (BOTH, 4, FOUR),
        (FOUR, 3, []),
        ([ANY], 1, [ANY]),
        ([CAPTURED, *FOUR], 3, []),
        ([CAPTURED, *FOUR], 4, [CAPTURED, *FOUR]),
        ([*FOUR, ANY], 4, [*FOUR, ANY]),
    ],
)
def test_the_largest_count_within_the_budget(
    held: list[Payload], budget: int, expected: list[Payload]
) -> None:
    assert list(payloads_within(held, budget)) == expected
