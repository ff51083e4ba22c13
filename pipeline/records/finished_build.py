"""A finished build, as a row of the ledger holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freezer.codec import decode, encode
from pipeline.records.failure import Failure, failure_to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedBuild:
    """One build.

    Attributes:
        recipe: which recipe was built.
        failure: None if there is a candidate.
        wall_s: duration in seconds.
        peak_bytes: largest resident memory of the child and its compilers.
        starts: number of campaign starts in which it failed; earlier releases did not store it.
    """

    recipe: str
    failure: Failure | None
    wall_s: float = 0.0
    peak_bytes: int = 0
    starts: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the ledger's form: flat."""
        return encode(self) | failure_to_json(self.failure)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FinishedBuild:
        """Return the record that `to_json` wrote."""
        return decode(cls, {**data, "failure": data if data["failure"] else None}, origin="build row")
