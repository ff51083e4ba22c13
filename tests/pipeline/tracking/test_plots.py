"""The figures of a campaign."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import MeasuredDrift
from pipeline.tracking import plots
from tests.support.outcomes import candidate, failed, outcome


def axes_of(figure: Any) -> Any:
    (axes,) = figure.axes
    return axes


def test_speedups_are_sorted_bars_with_a_line_at_one(tmp_path: Path) -> None:
    figure = plots.speedups(
        [
            outcome("slow", speedup=0.5, speedup_ci=(0.4, 0.6)),
            outcome("fast"),
            failed("gone", speedup=None),
        ]
    )
    axes = axes_of(figure)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["fast · portable", "slow · portable"]
    assert axes.yaxis_inverted()
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(1.0, 1.0), (1.0, -0.5)]
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in axes.lines)
    figure.savefig(tmp_path / "figure.png")


def test_drift_shows_every_candidate_and_the_gate(tmp_path: Path) -> None:
    exact = candidate("torchscript-frozen", drift=MeasuredDrift(error_ratio=0.0))
    broken = candidate(
        "inductor-frozen", drift=MeasuredDrift(error_ratio=float("inf")), problem="not finite"
    )
    figure = plots.drift(
        [
            outcome(
                "all",
                candidates=(
                    candidate("portable"),
                    exact,
                    broken,
                    candidate("none", drift=MeasuredDrift()),
                ),
            )
        ]
    )
    axes = axes_of(figure)
    points = [
        (line.get_marker(), line.get_markerfacecolor())
        for line in axes.lines
        if line.get_linestyle() == "None"
    ]
    assert [marker for marker, _ in points] == ["o", "<", ">"]
    assert points[2][1] == "white"
    assert any(list(line.get_xdata()) == [3.0, 3.0] for line in axes.lines)
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("num_rows", [0, 1, 200, 1000])
def test_figures_of_any_number_of_rows_can_be_drawn(num_rows: int) -> None:
    outcomes = [
        outcome(f"model-{i}", speedup=0.5 + i / 50, speedup_ci=None) for i in range(num_rows)
    ]
    for figure in (plots.speedups(outcomes), plots.drift(outcomes)):
        assert figure.get_size_inches()[1] < 60
        axes = axes_of(figure)
        assert len(axes.get_yticklabels()) == min(num_rows, 200) or num_rows == 0


def test_figures_leave_pyplot_alone() -> None:
    code = (
        "import sys\n"
        "from pipeline.tracking import plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.speedups([]); plots.drift([])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
