"""Reports at the end of a campaign: the table, and the JSON of `--json`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rich.console import Console
from rich.text import Text

from freezer.artifact import Tradeoff
from freezer.codec import encode
from freezer.errors import InfrastructureError
from freezer.files import SCHEMES, write_whole
from freezer.hardware import PORTABLE
from freezer.store import one_spelling
from pipeline.exit_codes import FAILED, INFRASTRUCTURE, INTERRUPTED, OK
from pipeline.records import STYLES, Outcome, iso
from pipeline.reporting.costs import ClassCost
from pipeline.tracking import without_password
from pipeline.workspace import log_place

UNEXPLAINED = ("crash", "timeout", "memory", "output", "error")
"""Failures that are printed with the end of their log, since the reason alone does not explain
them.
"""

_MODEL, _UNCHANGED, _COST = "model", " ", "cost per 1M"
_LEFT = (_MODEL, "device class", "verdict", _UNCHANGED, "recipe")
_COLUMNS = (
    *_LEFT,
    "speedup (95% CI)",
    "p50 ms",
    "eager ms",
    _COST,
    "error ratio",
    "version",
    "build s",
    "judge s",
)
_DROPPED_FIRST = (
    "build s",
    "judge s",
    "eager ms",
    "p50 ms",
    "version",
    "error ratio",
    _MODEL,
    _UNCHANGED,
    "recipe",
    _COST,
)
"""Columns to drop on a narrow terminal, in order; without the column, the model has a line of its
own above its classes.
"""

MAX_PARETO_CHARS = 80
"""Width of the line of a Pareto front, unless the names of model and class leave no room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignReport:
    """The result of a campaign.

    Attributes:
        campaign: its name.
        started, finished: seconds since the epoch.
        outcomes: of every (model, device class), in the order of the catalog.
        infrastructure: failures of Ray, MLflow or the store, one sentence each.
        untracked: those of them that concern MLflow alone.
        interrupted: whether a person stopped it.
        costs: of the classes with a price.
        limited: models whose entries limit latency, size or memory.
    """

    campaign: str
    started: float
    finished: float
    outcomes: tuple[Outcome, ...]
    infrastructure: tuple[str, ...] = ()
    interrupted: bool = False
    costs: tuple[ClassCost, ...] = ()
    limited: frozenset[str] = frozenset()
    untracked: tuple[str, ...] = ()

    @property
    def ends_watching(self) -> bool:
        """Whether it was interrupted, or Ray or the store failed."""
        return self.interrupted or set(self.infrastructure) != set(self.untracked)

    @property
    def exit_code(self) -> int:
        """130, else 3, else 1, else 0; see docs/contract.md."""
        if self.interrupted:
            return INTERRUPTED
        if self.infrastructure or any(
            outcome.failure_kind == "infrastructure" for outcome in self.outcomes
        ):
            return INFRASTRUCTURE
        return FAILED if any(outcome.failed for outcome in self.outcomes) else OK

    def to_json(self) -> dict[str, Any]:
        """The content of the `--json` file."""
        return {
            "campaign": self.campaign,
            "started": iso(self.started, timespec="milliseconds"),
            "finished": iso(self.finished, timespec="milliseconds"),
            "exit_code": self.exit_code,
            "outcomes": [outcome.for_json_report() for outcome in self.outcomes],
            "costs": [encode(cost) for cost in self.costs],
        }

    def write_json(self, path: Path) -> None:
        """Write the `--json` file atomically.

        Raises:
            InfrastructureError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(
                path, (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode()
            )
        except OSError as error:
            raise InfrastructureError(
                f"--json {path} cannot be written: {error}; nothing else is lost, run the same"
                " command to write it from the ledger"
            ) from error


def print_report(report: CampaignReport, console: Console, store: str = "./store") -> None:
    """Print the table of verdicts, failures first, and below it reasons, logs, warnings and
    Pareto fronts.

    Args:
        report: to print.
        console: to print on.
        store: URI of the store, which has the logs.
    """
    report = replace(
        report, outcomes=tuple(sorted(report.outcomes, key=lambda outcome: not outcome.failed))
    )
    console.print(Text(f"campaign {report.campaign}", style="italic"))
    for line in _table(report, console.width):
        console.print(line, soft_wrap=True)
    for (model, reason), alike in _reasons(report.outcomes).items():
        classes = ", ".join(outcome.device_class for outcome in alike)
        console.print(Text.assemble((f"{model} {classes}: ", "bold"), reason), soft_wrap=True)
        if alike[0].log_tail and alike[0].failure_kind in UNEXPLAINED:
            console.print(Text(_indented(alike[0].log_tail), style="dim"), soft_wrap=True)
        for log in dict.fromkeys(log for outcome in alike for log in _logs(outcome, store)):
            console.print(Text(f"    log: {log}"), soft_wrap=True)
    for (model, warning), alike in _warnings(report.outcomes).items():
        classes = ", ".join(outcome.device_class for outcome in alike)
        console.print(
            Text.assemble((f"{model} {classes}: ", "bold"), (f"warning: {warning}", "yellow")),
            soft_wrap=True,
        )
    for outcome in report.outcomes:
        if len(outcome.pareto) > 1 and (
            outcome.objective != "p50" or outcome.model in report.limited
        ):
            console.print(_pareto_line(outcome), soft_wrap=True)
    for failure in report.infrastructure:
        console.print(Text(failure, style="red"), soft_wrap=True)
    console.print(_summary(report), soft_wrap=True)


def _pareto_line(outcome: Outcome) -> Text:
    """Return the Pareto front in a line: figures of the outcome's recipe, then as many other
    candidates as fit into 80 columns.
    """
    front = sorted(outcome.pareto, key=lambda item: item.recipe != outcome.recipe)
    figures = [_front_figures(item, outcome.objective) for item in front]
    texts = [
        text if item.recipe == outcome.recipe else f"{item.recipe} {text}"
        for item, text in zip(front, figures, strict=True)
    ]
    start = f"{outcome.model} {outcome.device_class}: "
    for num_shown in range(len(texts), -1, -1):
        rest = [f"{len(texts) - num_shown} more"] if num_shown < len(texts) else []
        line = Text.assemble((start, "bold"), "pareto: ", "; ".join([*texts[:num_shown], *rest]))
        if len(line) <= MAX_PARETO_CHARS:
            break
    return line


def _front_figures(item: Tradeoff, objective: str) -> str:
    timings = {"p95": ("ms", item.p95_ms), "throughput": ("items/s", item.items_per_s)}
    timing = timings.get(objective, ("ms", item.p50_ms))
    figures = (
        timing,
        ("MB", item.size_mb),
        ("ms to load", item.load_ms),
        ("MB of memory", item.memory_mb),
    )
    return ", ".join(
        f"{value:.{3 if value < 1000 else 6}g} {unit}"
        for unit, value in figures
        if value is not None
    )


def _reasons(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Group outcomes that are unpublished, or slower than eager somewhere, by model and reason."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if (outcome.verdict != "published" or _is_slow_somewhere(outcome)) and outcome.coded_reason:
            found.setdefault((outcome.model, outcome.coded_reason), []).append(outcome)
    return found


def _is_slow_somewhere(outcome: Outcome) -> bool:
    """Whether a payload of the published recipe was slower than eager at a thread count and
    size.
    """
    points = (
        item
        for report in outcome.candidates
        if report.recipe == outcome.recipe
        for item in report.points
    )
    return outcome.device_class != PORTABLE and any(
        item.get("verdict") == "slower" for item in points
    )


def _warnings(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Group published outcomes by model and warning of the capture."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        for warning in outcome.warnings if outcome.verdict == "published" else ():
            found.setdefault((outcome.model, warning), []).append(outcome)
    return found


def _logs(outcome: Outcome, store: str) -> list[str]:
    """Return where the logs of the tasks are that failed: of builds, or else of the judge.

    In a folder, only logs that exist.
    """
    if outcome.failure is None:
        return []
    keys = [report.build_key for report in outcome.candidates if report.failure] or [
        outcome.judge_key
    ]
    uri = one_spelling(store)
    places = [log_place(uri, key) for key in keys if key]
    return (
        places
        if urlparse(uri).scheme in SCHEMES
        else [place for place in places if Path(place).is_file()]
    )


def _table(report: CampaignReport, width: int) -> list[Text]:
    """Return the lines of the table of outcomes, with the columns that fit the width."""
    costs = _cost_cells(report.costs)
    rows = [
        {**_cells(outcome), _COST: costs.get((outcome.model, outcome.device_class), "")}
        for outcome in report.outcomes
    ]
    used = [
        name
        for name in _COLUMNS
        if name not in (_COST, _UNCHANGED) or any(cells[name] for cells in rows)
    ]
    widths = {name: max([len(name), *(len(cells[name]) for cells in rows)]) for name in used}
    for dropped in _DROPPED_FIRST:
        indent = 1 if _MODEL in widths else 3
        if indent + sum(widths.values()) + 2 * (len(widths) - 1) <= width:
            break
        widths.pop(dropped, None)
    head = _line({name: Text(name, style="bold") for name in widths}, widths)
    lines = [head, Text(f" {'─' * (len(head) - 1)}")]
    model = None
    for cells in rows:
        if _MODEL not in widths and cells[_MODEL] != model:
            model = cells[_MODEL]
            lines.append(Text(f" {model}"))
        lines.append(_line(cells, widths))
    return lines


def _line(cells: Mapping[str, Text | str], widths: Mapping[str, int]) -> Text:
    """Return a line of the table; without the column of the models, it is indented."""
    line = Text("" if _MODEL in widths else "  ")
    for index, (name, width) in enumerate(widths.items()):
        padding = " " * (width - len(cells[name]))
        line.append_text(
            Text.assemble(
                "  " if index else " ",
                *((cells[name], padding) if name in _LEFT else (padding, cells[name])),
            )
        )
    line.rstrip()
    return line


def _cells(outcome: Outcome) -> dict[str, Text | str]:
    verdict = (
        outcome.verdict if outcome.failure is None else f"{outcome.verdict}: {outcome.failure.kind}"
    )
    figures = outcome.figures
    p50, eager = figures.latency_ms.p50, figures.latency_ms.eager_p50
    ratio = figures.drift.error_ratio
    ci = f" ({figures.speedup_ci[0]:.2f}-{figures.speedup_ci[1]:.2f})" if figures.speedup_ci else ""
    return {
        "model": outcome.model,
        "device class": outcome.device_class,
        "verdict": Text(verdict, style=STYLES.get(outcome.verdict, "")),
        _UNCHANGED: "unchanged" if outcome.cached else "",
        "recipe": outcome.recipe or "",
        "speedup (95% CI)": f"{figures.speedup:.2f}x{ci}" if figures.speedup is not None else "",
        "p50 ms": f"{p50:.3g}" if p50 is not None else "",
        "eager ms": f"{eager:.3g}" if eager is not None else "",
        "error ratio": f"{ratio:.2f}" if ratio is not None else "",
        "version": str(outcome.version or ""),
        "build s": f"{outcome.build_s:.1f}" if not outcome.cached else "",
        "judge s": f"{outcome.judge_s:.1f}" if not outcome.cached else "",
    }


def _cost_cells(costs: Sequence[ClassCost]) -> dict[tuple[str, str], str]:
    """Return the costs by model and class; of several classes of a model, the cheapest that meets
    the limits is marked.
    """
    several = {model for model, count in Counter(cost.model for cost in costs).items() if count > 1}
    return {
        (cost.model, cost.device_class): (
            f"{cost.cost_per_million:.3g}"
            + (
                " cheapest"
                if cost.cheapest and cost.model in several
                else ""
                if cost.meets_limits
                else " not within limits"
            )
        )
        for cost in costs
    }


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-8:])


def _summary(report: CampaignReport) -> str:
    counts: dict[str, int] = {}
    for outcome in report.outcomes:
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
    unchanged = sum(outcome.cached for outcome in report.outcomes)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no outcome"
    note = f" ({unchanged} unchanged)" if unchanged else ""
    stopped = "; interrupted, run the same command to continue" if report.interrupted else ""
    return f"{words}{note} in {report.finished - report.started:.0f} s{stopped}"


def print_next_steps(
    report: CampaignReport, console: Console, *, store: str, tracking_uri: str
) -> None:
    """Print commands to try next, as they run in this environment: browse, report, and for a
    published model pull and load.
    """
    if not report.outcomes:
        return
    location = () if store == "./store" else ("--store", store)
    activate = Path(sys.prefix) / "bin" / "activate"
    remote, address = (
        urlparse(tracking_uri).scheme in ("http", "https"),
        without_password(tracking_uri),
    )
    commands = {
        "activate": (
            [".", str(activate)] if activate.is_file() and shutil.which("coldpress") is None else []
        ),
        "browse": [address] if remote else ["mlflow", "ui", "--backend-store-uri", address],
        "report": ["coldpress", "report", report.campaign, *location],
    }
    model = next(
        (outcome.model for outcome in report.outcomes if outcome.version is not None), None
    )
    if model is not None:
        argument = json.dumps(model) + (
            "" if store == "./store" else f", store={json.dumps(store)}"
        )
        commands["pull"] = ["coldpress", "pull", model, *location, "--dest", f"pulled/{model}"]
        commands["load"] = ["python", "-c", f"import freezer; print(freezer.load({argument}))"]
    console.print("\n[bold]Try next[/bold]", highlight=False)
    for name, words in commands.items():
        if words:
            console.print(
                f"  {name:<8} {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True
            )
