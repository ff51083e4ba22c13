"""Result of `coldpress diff`: every class compared with every other and with the reference. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

REFERENCE = "reference"
"""Name of the golden outputs in place of a class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenInputs:
    """One set of golden inputs: its sizes, and the classes that have it."""

    point: Mapping[str, int]
    classes: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.point.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """One output of one set of golden inputs, by two classes or by a class and the reference.

    Attributes:
        set_index: index in `Difference.sets`.
        num_differing: unequal elements of an integer or bool output.
        error_ratio: rmse between the two, over the larger of the eager model's own errors; pooled where the gate pools.
        bound: sum of the rmse that the gate allows each to differ from the reference.
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
        """Sort key: rows that are apart, of these first the ones without a figure; then by the error ratio."""
        ratio = self.error_ratio
        return self.problem is not None, self.problem is not None and ratio is None, ratio or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two classes, or a class and the reference; `rows` is empty if they share no output of one set."""

    one: str
    other: str
    rows: tuple[DiffRow, ...]

    @property
    def apart(self) -> bool:
        """Whether any output exceeds its bound."""
        return any(row.problem for row in self.rows)

    @property
    def worst(self) -> DiffRow | None:
        """The row that is furthest apart."""
        return max(self.rows, key=lambda row: row.severity, default=None)

    @property
    def error_ratio(self) -> float | None:
        """The largest of all outputs and sets; None without floating-point outputs."""
        return max((row.error_ratio for row in self.rows if row.error_ratio is not None), default=None)

    @property
    def num_differing(self) -> int:
        """Unequal elements of integer and bool outputs, in all sets."""
        return sum(row.num_differing for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """JSON form; infinite figures are null."""
        worst = self.worst and {name: _finite(value) for name, value in asdict(self.worst).items()}
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
    """Result for one version.

    Attributes:
        classes: classes with recorded outputs, sorted.
        sets: golden inputs of any of these classes.
        pairs: every two classes.
        to_reference: every class with the golden outputs.
        not_compared: reasons for the other classes of the version.
        notes: limits of the figures.
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
        """Whether any two classes are apart. The gate judged the distance from the reference; it is only shown."""
        return any(pair.apart for pair in self.pairs)

    @property
    def worst(self) -> Pair | None:
        """The two classes that are furthest apart."""
        compared = [pair for pair in self.pairs if pair.worst is not None]
        return max(compared, key=lambda pair: pair.worst.severity if pair.worst else (False, False, 0.0), default=None)

    def where(self, row: DiffRow) -> str:
        """An output and its golden inputs, as text."""
        sizes = str(self.sets[row.set_index])
        return f"output {row.output!r}, golden set {row.set_index}" + (f" ({sizes})" if sizes else "")

    def to_json(self) -> dict[str, Any]:
        """JSON form, for `--json`."""
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


def matrix(found: Difference) -> Table:
    """The largest error ratio of every two classes, and of every class and the reference. Columns are numbered like rows."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("error ratio")
    for number in range(1, len(found.classes) + 1):
        table.add_column(str(number), justify="right")
    table.add_column(REFERENCE, justify="right")
    pairs = {frozenset((pair.one, pair.other)): pair for pair in (*found.pairs, *found.to_reference)}
    for number, name in enumerate(found.classes, start=1):
        others = ["-" if name == other else _cell(pairs[frozenset((name, other))]) for other in (*found.classes, REFERENCE)]
        table.add_row(str(number), name, *others)
    return table


def _cell(pair: Pair) -> str:
    if not pair.rows:
        return "not compared"
    if pair.num_differing:
        return f"{pair.num_differing} differ"
    ratio = "equal" if pair.error_ratio is None else f"{pair.error_ratio:.2f}"
    return f"{ratio} apart" if pair.apart else ratio


def sentences(found: Difference) -> Iterator[str]:
    """Notes on the matrix, and the pair that is furthest apart."""
    for name, why in found.not_compared.items():
        yield f"{name}: {why}"
    yield from found.notes
    for index, item in enumerate(found.sets):
        if len(item.classes) < len(found.classes):
            only, sizes = ", ".join(item.classes), f" ({item})" if str(item) else ""
            yield f"golden set {index}{sizes} is only in {only}: the others were judged with other inputs"
    for pair in found.pairs:
        if not pair.rows:
            yield f"{pair.one} and {pair.other} have no output for the same golden inputs and cannot be compared"
    if found.worst is not None and found.worst.worst is not None:
        pair, row = found.worst, found.worst.worst
        yield f"furthest apart: {pair.one} and {pair.other}: {found.where(row)}: {_figures(row)}"
    elif len(found.classes) < 2:
        yield f"{len(found.classes)} class{'' if len(found.classes) == 1 else 'es'} with outputs: no pair to compare"


def _figures(row: DiffRow) -> str:
    if row.error_ratio is None:
        return row.problem or f"all {row.num_elements} elements are equal"
    allowed = f", rmse {row.rmse:.3g}, allowed {row.bound:.3g}"
    return f"error ratio {row.error_ratio:.2f}, max abs err {row.max_abs_err:.3g}{allowed}"


def problem(found: Difference) -> str:
    """Error message for a version whose classes are apart; lists every pair."""
    apart = [(pair, row) for pair in found.pairs if pair.apart and (row := pair.worst)]
    pairs = [f"{pair.one} and {pair.other}: {found.where(row)}: {row.problem}" for pair, row in apart]
    return (
        f"{found.model}:{found.version} answers differently on different device classes: {'; '.join(pairs)}. This exceeds the sum "
        "of both bounds: compare their recipes with `coldpress inspect --device-class`, and freeze the class again "
        "that is further from the reference"
    )
