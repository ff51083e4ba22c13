"""Figures of a campaign: speedups with their confidence intervals, and drift. Pure functions of
outcomes.

Drawn without pyplot, whose global state would be shared with the rest of the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pipeline.records import CandidateReport, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = TypeVar("Row")

MAX_ROWS = 200
"""Rows of a figure; of more outcomes, the first and the last are shown."""

GATE = 3.0
"""The default drift gate (docs/measuring.md); an entry may set its own."""

VERDICT_COLORS: Mapping[str, str] = {
    "published": "#1b7f5c",
    "kept-eager": "#8a929c",
    "kept-previous": "#3b6ea8",
    "rejected": "#c2452d",
    "unstable": "#d99a1c",
    "failed": "#5b2333",
}
WIDTH_IN, ROW_IN, MARGIN_IN, DPI = 10.0, 0.26, 1.5, 110


def speedups(outcomes: Sequence[Outcome]) -> Figure:
    """Draw a bar for each timed outcome from 1.0 to its speedup, with its interval, fastest on top,
    colored by verdict.
    """
    rows = sorted(
        (item for item in outcomes if item.figures.speedup),
        key=lambda item: item.figures.speedup or 0.0,
        reverse=True,
    )
    shown = _both_ends(rows)
    figure, axes = _figure(
        f"Speedup over eager, with 95% confidence intervals{_how_many(shown, rows)}", _labels(shown)
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel("times faster than eager")
    axes.axvline(1.0, color="black", linewidth=1.2)
    labelled: set[str] = set()
    for place, outcome in enumerate(shown):
        value = outcome.figures.speedup or 1.0
        low, high = outcome.figures.speedup_ci or (value, value)
        axes.barh(
            place,
            value - 1.0,
            left=1.0,
            xerr=[[max(value - low, 0.0)], [max(high - value, 0.0)]],
            color=VERDICT_COLORS[outcome.verdict],
            capsize=2.5,
            label=None if outcome.verdict in labelled else outcome.verdict,
        )
        labelled.add(outcome.verdict)
        text = f"  {value:.2f}× {outcome.recipe or ''}"
        axes.annotate(text, (max(high, value, 1.0), place), va="center", fontsize=7.5)
    axes.margins(x=0.2)
    _legend(figure, labelled)
    return figure


def drift(outcomes: Sequence[Outcome]) -> Figure:
    """Draw a point for each compared candidate at its error ratio, one row for each outcome, worst
    on top, with the gate.

    Candidates that fail are hollow; an arrow marks a ratio outside of the axis (0, infinite, NaN).
    """
    compared = [
        (outcome, [c for c in outcome.candidates if _ratio(c) is not None]) for outcome in outcomes
    ]
    rows = sorted(
        (row for row in compared if row[1]),
        key=lambda row: max(_ratio(c) or 0.0 for c in row[1]),
        reverse=True,
    )
    shown = _both_ends(rows)
    title = f"Drift: error ratio against the float64 reference{_how_many(shown, rows)}"
    figure, axes = _figure(title, _labels([outcome for outcome, _ in shown]))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("error ratio: 1 is eager's own error; hollow: does not pass")
    axes.axvline(GATE, color=VERDICT_COLORS["rejected"], linewidth=1.2, label=f"gate at {GATE:g}")
    ratios = [_ratio(candidate) or 0.0 for _, candidates in shown for candidate in candidates]
    inside = [ratio for ratio in ratios if 1e-3 <= ratio <= 1e6]
    low, high = min([0.1, *inside]) / 1.5, max([10.0, *inside]) * 1.5
    axes.set_xlim(low / 1.4, high * 1.4)
    recipes = sorted({candidate.recipe for _, candidates in shown for candidate in candidates})
    labelled: set[str] = set()
    for place, (_, candidates) in enumerate(shown):
        for candidate in candidates:
            ratio, color = _ratio(candidate) or 0.0, f"C{recipes.index(candidate.recipe)}"
            axes.plot(
                min(max(ratio, low), high),
                place,
                marker="<" if ratio < low else ">" if ratio > high else "o",
                markerfacecolor="white" if candidate.problem else color,
                markeredgecolor=color,
                linestyle="none",
                label=None if candidate.recipe in labelled else candidate.recipe,
            )
            labelled.add(candidate.recipe)
    _legend(figure, labelled)
    return figure


def _ratio(candidate: CandidateReport) -> float | None:
    """Return the error ratio, infinite instead of NaN; None if nothing was compared."""
    value = candidate.figures.drift.error_ratio
    return math.inf if value is not None and math.isnan(value) else value


def _figure(title: str, labels: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a figure with a labelled row for each outcome, the first on top."""
    from matplotlib.figure import Figure

    num_rows = max(len(labels), 2)
    figure = Figure(
        figsize=(WIDTH_IN, MARGIN_IN + ROW_IN * num_rows), dpi=DPI, layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    axes = figure.add_subplot()
    axes.grid(axis="x", alpha=0.4)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(num_rows - 0.4, -0.6)
    return figure, axes


def _labels(outcomes: Sequence[Outcome]) -> list[str]:
    labels = [f"{outcome.model} · {outcome.device_class}" for outcome in outcomes]
    return [label if len(label) <= 60 else f"{label[:29]}…{label[-30:]}" for label in labels]


def _legend(figure: Figure, labelled: set[str]) -> None:
    if labelled:
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)


def _both_ends(rows: Sequence[Row]) -> list[Row]:
    half = MAX_ROWS // 2
    return list(rows) if len(rows) <= MAX_ROWS else [*rows[:half], *rows[-half:]]


def _how_many(shown: Sequence[object], rows: Sequence[object]) -> str:
    return f" ({len(shown)} of {len(rows)}: both ends)" if len(shown) < len(rows) else ""
