"""The two figures of a campaign: speedups with their confidence intervals, and drift. Pure functions of outcomes.

They are drawn without pyplot, whose global state a long-lived driver would share with whatever else it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pipeline.records.outcome import CandidateReport, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = TypeVar("Row")

MAX_ROWS = 200
"""A figure of more rows is read by no one; the first and the last are kept."""

GATE = 3.0
"""The default drift gate (METHODS.md); an entry may set its own."""

VERDICT_COLORS: Mapping[str, str] = {
    "published": "#1b7f5c",
    "kept-eager": "#8a929c",
    "rejected": "#c2452d",
    "unstable": "#d99a1c",
    "failed": "#5b2333",
}
RECIPE_COLORS = ("#2563a8", "#d9822b", "#1b7f5c", "#8e4aa8", "#b5a000", "#3f9fb5", "#a83a5b", "#5f5f5f")

WIDTH_IN = 10.0
ROW_IN = 0.26
MARGIN_IN = 1.5
TALL_ROWS = 40
"""From here on the scale is repeated on top."""

DPI = 110
INK, FAINT, GRID = "#22272e", "#6b7480", "#dfe3e8"


def speedups(outcomes: Sequence[Outcome]) -> Figure:
    """A bar for each timed outcome from 1.0 to its speedup, with its interval, fastest on top, colored by verdict."""
    timed = [outcome for outcome in outcomes if outcome.figures.speedup]
    rows = sorted(timed, key=lambda outcome: outcome.figures.speedup or 0.0, reverse=True)
    shown = _middle_cut(rows)
    title = f"Speedup over eager, with 95% confidence intervals{_of_how_many(len(shown), len(rows))}"
    if not shown:
        return _empty_figure(title, "no outcome was timed")
    figure, axes = _figure(len(shown))
    axes.set_xscale("log", base=2)
    for place, outcome in enumerate(shown):
        _speedup_bar(axes, place, outcome)
    low = min(min(o.figures.speedup_ci[0] if o.figures.speedup_ci else math.inf, o.figures.speedup or 1.0) for o in shown)
    high = max(max(o.figures.speedup_ci[1] if o.figures.speedup_ci else 0.0, o.figures.speedup or 1.0) for o in shown)
    axes.set_xlim(min(low, 1.0) * 0.9, max(high, 1.0) * 1.35)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    _label_ticks(axes, *axes.get_xlim(), base=2.0, unit="×")
    axes.set_xlabel("times faster than eager (log scale)", color=FAINT, fontsize=9)
    _label_rows(axes, [f"{outcome.model} · {outcome.device_class}" for outcome in shown])
    used = [verdict for verdict in VERDICT_COLORS if any(outcome.verdict == verdict for outcome in shown)]
    _legend(figure, title, {verdict: ("s", VERDICT_COLORS[verdict], VERDICT_COLORS[verdict]) for verdict in used})
    return figure


def _speedup_bar(axes: Axes, place: int, outcome: Outcome) -> None:
    value = outcome.figures.speedup or 1.0
    color = VERDICT_COLORS.get(outcome.verdict, FAINT)
    axes.barh(place, value - 1.0, left=1.0, height=0.62, color=color, alpha=0.85, linewidth=0)
    end = value
    if outcome.figures.speedup_ci:
        low, high = outcome.figures.speedup_ci
        errors = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
        axes.errorbar(value, place, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5)
        end = max(high, value)
    text = f"{value:.2f}×  {outcome.recipe or ''}".rstrip()
    axes.annotate(text, (max(end, 1.0), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5, color=FAINT)


def drift(outcomes: Sequence[Outcome]) -> Figure:
    """A point for each compared candidate at its error ratio, one row for each outcome, worst on top, with the gate."""
    compared = [(outcome, _compared(outcome)) for outcome in outcomes]
    rows = sorted((row for row in compared if row[1]), key=lambda row: max(_ratio(c) for c in row[1]), reverse=True)
    shown = _middle_cut(rows)
    title = f"Drift: error ratio against the float64 reference{_of_how_many(len(shown), len(rows))}"
    if not shown:
        return _empty_figure(title, "nothing was compared")
    figure, axes = _figure(len(shown))
    axes.set_xscale("log")
    recipes = sorted({candidate.recipe for _, candidates in shown for candidate in candidates})
    colors = {recipe: RECIPE_COLORS[index % len(RECIPE_COLORS)] for index, recipe in enumerate(recipes)}
    low, high = _drift_limits([_ratio(candidate) for _, candidates in shown for candidate in candidates])
    for place, (_, candidates) in enumerate(shown):
        for candidate in candidates:
            _drift_point(axes, place, candidate, color=colors[candidate.recipe], bounds=(low, high))
    axes.set_xlim(low / 1.4, high * 1.4)
    axes.axvspan(GATE, high * 1.4, color=VERDICT_COLORS["rejected"], alpha=0.07, linewidth=0)
    axes.axvline(GATE, color=VERDICT_COLORS["rejected"], linewidth=1.2)
    _label_ticks(axes, *axes.get_xlim(), base=10.0, unit="")
    axes.set_xlabel("error ratio: 1 is as far from float64 as eager is (log scale; arrows lie outside)", color=FAINT, fontsize=9)
    _label_rows(axes, [f"{outcome.model} · {outcome.device_class}" for outcome, _ in shown])
    marks = {recipe: ("o", color, color) for recipe, color in colors.items()}
    if any(candidate.problem for _, candidates in shown for candidate in candidates):
        marks["does not pass"] = ("o", "white", INK)
    marks[f"gate at {GATE:g}"] = ("|", VERDICT_COLORS["rejected"], VERDICT_COLORS["rejected"])
    _legend(figure, title, marks)
    return figure


def _compared(outcome: Outcome) -> list[CandidateReport]:
    return [c for c in outcome.candidates if c.figures.drift and c.figures.drift.get("error_ratio") is not None]


def _ratio(candidate: CandidateReport) -> float:
    """The error ratio; what is not a number is the worst there is."""
    value = (candidate.figures.drift or {}).get("error_ratio")
    return math.inf if value is None or math.isnan(value) else value


def _drift_limits(ratios: Sequence[float]) -> tuple[float, float]:
    """Bounds of the axis: a bit-identical candidate (0) and a broken one (infinite) are drawn at them."""
    inside = [ratio for ratio in ratios if 1e-3 <= ratio <= 1e6]
    return min([0.1, *inside]) / 1.5, max([10.0, *inside]) * 1.5


def _drift_point(axes: Axes, place: int, candidate: CandidateReport, *, color: str, bounds: tuple[float, float]) -> None:
    (low, high), ratio = bounds, _ratio(candidate)
    marker = "<" if ratio < low else ">" if ratio > high else "o"
    face = "white" if candidate.problem else color
    axes.plot(
        min(max(ratio, low), high),
        place,
        marker=marker,
        markersize=6,
        markerfacecolor=face,
        markeredgecolor=color,
        markeredgewidth=1.4,
        linestyle="none",
        zorder=3,
    )


def _figure(num_rows: int) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, MARGIN_IN + ROW_IN * max(num_rows, 2)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="both", length=0, labelcolor=INK, labeltop=num_rows > TALL_ROWS)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    return figure, axes


def _empty_figure(title: str, text: str) -> Figure:
    figure, axes = _figure(2)
    axes.set_axis_off()
    _legend(figure, title, {})
    axes.text(0.0, 0.5, text, color=FAINT, fontsize=10)
    return figure


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows, first on top."""
    shown = [label if len(label) <= 60 else f"{label[:29]}…{label[-30:]}" for label in labels]
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(max(len(shown), 2) - 0.4, -0.6)


def _label_ticks(axes: Axes, low: float, high: float, *, base: float, unit: str) -> None:
    """Ticks at powers of the base, and between them where there are few powers, as plain numbers."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    between: tuple[float, ...] = (1.0,)
    if base == 2.0 and len(powers) <= 5:
        between = (1.0, 1.25, 1.5, 1.75) if len(powers) <= 3 else (1.0, 1.5)
    ticks = [base**power * part for power in powers for part in between]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:.4g}{unit}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)


def _legend(figure: Figure, title: str, marks: Mapping[str, tuple[str, str, str]]) -> None:
    """The title, and under it the legend: marker, face and edge color by label."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker=marker, markerfacecolor=face, markeredgecolor=edge, linestyle="none", markersize=6, label=label)
        for label, (marker, face, edge) in marks.items()
    ]
    # The title is the legend's: apart from each other they would not be laid out, and overlap.
    legend = figure.legend(
        handles=handles,
        title=title,
        title_fontsize=11,
        alignment="left",
        loc="outside upper left",
        ncols=min(max(len(handles), 1), 6),
        frameon=False,
        fontsize=8,
        handletextpad=0.2,
        columnspacing=1.4,
        borderaxespad=0.2,
        labelcolor=INK,
    )
    legend.get_title().set_color(INK)


def _middle_cut(rows: Sequence[Row]) -> list[Row]:
    """The rows, without the middle ones when there are too many."""
    half = MAX_ROWS // 2
    return list(rows) if len(rows) <= MAX_ROWS else [*rows[:half], *rows[-half:]]


def _of_how_many(num_shown: int, num_rows: int) -> str:
    return f" ({num_shown} of {num_rows}: both ends)" if num_shown < num_rows else ""
