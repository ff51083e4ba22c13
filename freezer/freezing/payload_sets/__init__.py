"""Payloads beside the winner's deciding one: for further thread counts and for slow sizes."""

from freezer.freezing.payload_sets.further_threads import (
    with_further_threads,
)
from freezer.freezing.payload_sets.other_payloads import (
    with_other_payloads,
)

__all__ = [
    "with_further_threads",
    "with_other_payloads",
]
