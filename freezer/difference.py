"""What `coldpress diff` found: every class against every other and against the reference. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

REFERENCE = "reference"
"""What stands for the golden outputs where the name of a class could be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenInputs:
    """One set of golden inputs: its sizes, and the classes that hold it."""

    point: Mapping[str, int]
    classes: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.point.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """One output of one set of golden inputs, by two classes or by a class and the reference.

    Attributes:
        set_index: of Difference.sets.
        num_differing: elements of an integer or bool output that are not equal.
        error_ratio: rmse between the two, over the larger of the eager model's own errors; pooled where the gate pools.
        bound: the sum of what each may be from the reference.
        problem: why they are apart; None where they are not.
    """

    output: str
    set_index: int
    num_elements: int
    num_differing: int = 0
    error_ratio: float | None = None
    max_abs_err: float | None = None
    rmse: float | None = None
    bound: float | None = None
    problem: str | None = None

    @property
    def severity(self) -> tuple[bool, bool, float]:
        """Orders rows: those that are apart are the worst, of them those without a figure, then by the error ratio."""
        ratio = self.error_ratio
        return self.problem is not None, self.problem is not None and ratio is None, ratio or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two classes, or a class and the reference; `rows` is empty where they have no output of one set in common."""

    one: str
    other: str
    rows: tuple[DiffRow, ...]

    @property
    def apart(self) -> bool:
        """Whether any output is further apart than both may be from the reference."""
        return any(row.problem for row in self.rows)

    @property
    def worst(self) -> DiffRow | None:
        """The row that is furthest apart."""
        return max(self.rows, key=lambda row: row.severity, default=None)

    @property
    def error_ratio(self) -> float | None:
        """The worst of all outputs and sets; None where there is no floating-point output."""
        return max((row.error_ratio for row in self.rows if row.error_ratio is not None), default=None)

    @property
    def num_differing(self) -> int:
        """Elements of integer and bool outputs that are not equal, in all sets."""
        return sum(row.num_differing for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The pair as `--json` prints it; what is infinite is null."""
        worst = None if self.worst is None else {name: _finite(value) for name, value in asdict(self.worst).items()}
        return {
            "one": self.one,
            "other": self.other,
            "apart": self.apart,
            "error_ratio": _finite(self.error_ratio),
            "num_differing": self.num_differing,
            "num_compared": len(self.rows),
            "worst": worst,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far the classes of a version are apart.

    Attributes:
        classes: those whose outputs are kept, sorted.
        sets: all golden inputs that any of them holds.
        pairs: every class against every other; to_reference: every class against the golden outputs.
        not_compared: for each other class of the version, why not.
        notes: what limits the figures.
    """

    model: str
    version: int
    classes: tuple[str, ...]
    sets: tuple[GoldenInputs, ...]
    pairs: tuple[Pair, ...]
    to_reference: tuple[Pair, ...]
    not_compared: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def apart(self) -> bool:
        """Whether any two classes are. The distance from the reference is what the gate judged, and is shown alone."""
        return any(pair.apart for pair in self.pairs)

    @property
    def worst(self) -> Pair | None:
        """The two classes that are furthest apart."""
        compared = [pair for pair in self.pairs if pair.worst is not None]
        return max(compared, key=lambda pair: pair.worst.severity if pair.worst else (False, False, 0.0), default=None)

    def where(self, row: DiffRow) -> str:
        """An output and its golden inputs, for people."""
        sizes = str(self.sets[row.set_index])
        return f"output {row.output!r}, golden set {row.set_index}" + (f" ({sizes})" if sizes else "")

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "model": self.model,
            "version": self.version,
            "apart": self.apart,
            "classes": list(self.classes),
            "sets": [{"point": dict(item.point), "classes": list(item.classes)} for item in self.sets],
            "pairs": [pair.to_json() for pair in self.pairs],
            "reference": [pair.to_json() for pair in self.to_reference],
            "not_compared": dict(self.not_compared),
            "notes": list(self.notes),
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
