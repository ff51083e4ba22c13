"""The drift of one candidate: a row for each output of each call, and the report over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from freezer.artifact import MeasuredDrift
from freezer.codec import frozen
from freezer.compare import Gate, finite

MAX_ADVISED_RATIO = 30.0
"""Largest `error_ratio_max` that a message recommends: a candidate that is further off computes
another function.
"""

CallKind = Literal["single", "sequence", "after-reset"]


@frozen
class DriftRow:
    """The drift of one output in one call: a row of evidence/drift.parquet. Most figures are None
    for integers and bools.

    Attributes:
        native_rmse: rmse of eager against the reference; of integers and bools that eager draws,
            the difference between its runs.
        bound: limit on rmse; None where OpenVINO's bounds apply.
        problem: what failed, or None.
        recipe, num_threads, payload: recipe, thread count and payload path of the run.
        num_ties: elements that differ because rounding decides them (see `ties`); the figures are
            without them.
    """

    recipe: str = ""
    kind: CallKind
    set_index: int
    output: str
    num_elements: int
    max_abs_err: float | None = None
    max_rel_err: float | None = None
    rmse: float | None = None
    native_rmse: float | None = None
    rms: float | None = None
    error_ratio: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    gain: float | None = None
    bound: float | None = None
    problem: str | None = None
    num_threads: int = 0
    payload: str = ""
    num_ties: int = 0


@frozen
class DriftReport:
    """The drift of one candidate; by default of one that did not run.

    Attributes:
        measured: the worst figures of all rows.
        nearest_miss: the worst row of a failed candidate in one sentence, with the limit that would
            have passed; None if every row passed.
        rows: the evidence.
    """

    measured: MeasuredDrift = MeasuredDrift()
    nearest_miss: str | None = None
    rows: Sequence[DriftRow] = ()

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return self.nearest_miss is None


def report(rows: Sequence[DriftRow], gate: Gate) -> DriftReport:
    """The drift of one candidate in all of its runs."""
    margins = [row.bound / row.rmse for row in rows if row.bound is not None and row.rmse]
    return DriftReport(
        measured=MeasuredDrift(
            error_ratio=finite(max(_known(row.error_ratio for row in rows), default=None)),
            max_abs_err=finite(max(_known(row.max_abs_err for row in rows), default=None)),
            sqnr_db=min(_known(row.sqnr_db for row in rows), default=None),
            margin=finite(min(margins, default=None)),
        ),
        nearest_miss=_nearest_miss(rows, gate),
        rows=rows,
    )


def _known(figures: Iterable[float | None]) -> list[float]:
    return [figure for figure in figures if figure is not None]


def _nearest_miss(rows: Sequence[DriftRow], gate: Gate) -> str | None:
    """The worst row in one sentence, with the limit that would have passed, up to
    MAX_ADVISED_RATIO; None if all rows passed.
    """
    if not rows:
        return "no output was compared"
    failed = [row for row in rows if row.problem]
    if not failed:
        return None
    worst = max(failed, key=lambda row: math.inf if row.error_ratio is None else row.error_ratio)
    miss = f"output {worst.output!r}, input set {worst.set_index} ({worst.kind}): {worst.problem}"
    ratio = worst.error_ratio
    if ratio is None or worst.bound is None:
        return miss
    if not gate.error_ratio_max < ratio <= MAX_ADVISED_RATIO:
        return miss  # no error_ratio_max would have passed, or one that accepts another function
    return f"{miss}; limits.error_ratio_max: {math.ceil(ratio)} would have passed"
