"""What people read of a campaign besides its display: at its end a table of verdicts, reasons, and
commands to try next; with `--explain`, what it would do with each item, and why.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from freezer.files import SCHEMES
from freezer.hardware import PORTABLE
from freezer.store import one_spelling
from pipeline.planning import Item, Plan
from pipeline.records import SKIPPED, STYLES, Event, Outcome, Row, rounded
from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.display import Display
from pipeline.scheduling import BuildRecords
from pipeline.tracking import without_password
from pipeline.workspace import log_place

Cells = Mapping[str, Text | str]
"""The cells of a row, by column."""

UNLIMITED = 1000
"""Columns of a terminal that every table fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a table.

    Attributes:
        names: every column, in order.
        numeric: columns that are aligned to the right.
        dropped_first: columns to drop on a narrow terminal, in order.
        optional: columns to drop if all their cells are empty.
    """

    names: Sequence[str]
    numeric: Sequence[str]
    dropped_first: Sequence[str]
    optional: Sequence[str] = ()


def fitting_table(
    columns: Columns, rows: Sequence[Cells], console: Console, *, title: str | None = None
) -> Table:
    """Return a table with the columns that fit a console."""
    used = {name for cells in rows for name, cell in cells.items() if cell}
    names = [name for name in columns.names if name not in columns.optional or name in used]
    unlimited = console.options.update(max_width=UNLIMITED)
    table = _table(columns, names, rows, title)
    for dropped in columns.dropped_first:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        names = [name for name in names if name != dropped]
        table = _table(columns, names, rows, title)
    return table


def _table(
    columns: Columns, names: Sequence[str], rows: Sequence[Cells], title: str | None
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != columns.names[0])
        if name in columns.numeric:
            table.columns[-1].justify = "right"
    for cells in rows:
        table.add_row(*(cells[name] for name in names))
    return table


UNEXPLAINED = ("crash", "timeout", "memory", "output", "error")
"""Failures that are printed with the end of their log, since the reason alone does not explain
them.
"""

MAX_LOG_LINES = 8

_UNCHANGED = " "
_FIGURES = ("speedup (95% CI)", "p50 ms", "eager ms", "error ratio", "version")
_SECONDS = ("build s", "judge s")
COLUMNS = Columns(
    names=("model", "device class", "verdict", _UNCHANGED, "recipe", *_FIGURES, *_SECONDS),
    numeric=(*_FIGURES, *_SECONDS),
    dropped_first=(
        *_SECONDS,
        "eager ms",
        "p50 ms",
        "version",
        "error ratio",
        _UNCHANGED,
        "recipe",
    ),
    optional=(_UNCHANGED,),
)


def print_report(report: CampaignReport, console: Console, store: str = "./store") -> None:
    """Print the table of verdicts, failures first, and below it reasons, logs and warnings.

    Args:
        report: the report to print.
        console: console to print on.
        store: URI of the store, which has the logs.
    """
    outcomes = sorted(report.outcomes, key=lambda outcome: not outcome.failed)
    console.print(Text(f"campaign {report.campaign}", style="italic"))
    rows = [_cells(outcome) for outcome in outcomes]
    if rows:
        console.print(fitting_table(COLUMNS, rows, console))
    for line in (
        *_reasons(outcomes, store),
        *_warnings(outcomes),
        *(Text(failure, style="red") for failure in report.infrastructure),
        Text(_summary(report, outcomes)),
    ):
        console.print(line, soft_wrap=True)


def _cells(outcome: Outcome) -> dict[str, Text | str]:
    row, kind = Row.of(outcome), outcome.failure_kind
    verdict = f"{row.verdict}: {kind}" if kind else row.verdict
    return {
        "model": row.model,
        "device class": row.device_class,
        "verdict": Text(verdict, style=STYLES.get(row.verdict, "")),
        _UNCHANGED: "unchanged" if row.cached else "",
        "recipe": row.recipe or "",
        "speedup (95% CI)": row.speedup_text,
        "p50 ms": rounded(row.p50_ms),
        "eager ms": rounded(row.eager_p50_ms),
        "error ratio": "" if row.error_ratio is None else f"{row.error_ratio:.2f}",
        "version": str(row.version or ""),
        "build s": "" if row.cached else f"{row.build_s:.1f}",
        "judge s": "" if row.cached else f"{row.judge_s:.1f}",
    }


def _reasons(outcomes: Iterable[Outcome], store: str) -> Iterable[Text]:
    """Yield why outcomes are unpublished, or slower than eager somewhere, with their logs; one line
    for equal reasons of a model.
    """
    groups = defaultdict[tuple[str, str], list[Outcome]](list)
    for outcome in outcomes:
        reason = outcome.coded_reason
        if reason and (outcome.verdict != "published" or _is_slow_somewhere(outcome)):
            groups[outcome.model, reason].append(outcome)
    for (_, reason), alike in groups.items():
        yield _about(alike, reason)
        first = alike[0]
        if first.log_tail and first.failure_kind in UNEXPLAINED:
            lines = first.log_tail.splitlines()
            for line in lines[-MAX_LOG_LINES:]:
                yield Text(f"    {line}", style="dim")
        logs = dict[str, None]()
        for outcome in alike:
            logs |= dict.fromkeys(_logs(outcome, store))
        for log in logs:
            yield Text(f"    log: {log}")


def _about(alike: Sequence[Outcome], text: str, style: str = "") -> Text:
    """Return a line about outcomes of one model."""
    classes = ", ".join(outcome.device_class for outcome in alike)
    head = f"{alike[0].model} {classes}: "
    return Text.assemble((head, "bold"), (text, style))


def _is_slow_somewhere(outcome: Outcome) -> bool:
    """Whether a payload of the published recipe was slower than eager at a thread count and
    size.
    """
    if outcome.device_class == PORTABLE or outcome.report is None:
        return False
    return any(point.verdict == "slower" for point in outcome.report.points)


def _logs(outcome: Outcome, store: str) -> list[str]:
    """Return where the logs of the tasks are that failed: of builds, or else of the judge.

    In a folder, only logs that exist.
    """
    if outcome.failure is None:
        return []
    failed = [report.build_key for report in outcome.candidates if report.failure]
    uri = one_spelling(store)
    places = [log_place(uri, key) for key in failed or [outcome.judge_key] if key]
    if urlparse(uri).scheme in SCHEMES:
        return places
    return [place for place in places if Path(place).is_file()]


def _warnings(outcomes: Iterable[Outcome]) -> Iterable[Text]:
    """Yield the warnings of captures of published outcomes."""
    groups = defaultdict[tuple[str, str], list[Outcome]](list)
    for outcome in outcomes:
        if outcome.verdict != "published":
            continue
        for warning in outcome.warnings:
            groups[outcome.model, warning].append(outcome)
    for (_, warning), alike in groups.items():
        yield _about(alike, f"warning: {warning}", "yellow")


def _summary(report: CampaignReport, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    parts = [f"{count} {verdict}" for verdict, count in counts.items()]
    line = ", ".join(parts) or "no outcome"
    unchanged = sum(outcome.cached for outcome in outcomes)
    if unchanged:
        line += f" ({unchanged} unchanged)"
    line += f" in {report.finished - report.started:.0f} s"
    if report.interrupted:
        line += "; interrupted, run the same command to continue"
    return line


def print_next_steps(
    report: CampaignReport, console: Console, *, store: str, tracking_uri: str
) -> None:
    """Print commands to try next, as they run in this environment: browse, report, and for a
    published model pull and load.
    """
    if not report.outcomes:
        return
    console.print("\n[bold]Try next[/bold]", highlight=False)
    for name, words in _next_steps(report, store, tracking_uri).items():
        line = f"  {name:<8} {shlex.join(words)}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _next_steps(
    report: CampaignReport, store: str, tracking_uri: str
) -> Mapping[str, Sequence[str]]:
    commands: dict[str, Sequence[str]] = {}
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.is_file() and shutil.which("coldpress") is None:
        commands["activate"] = [".", str(activate)]
    address = without_password(tracking_uri)
    if urlparse(tracking_uri).scheme in ("http", "https"):
        commands["browse"] = [address]
    else:
        commands["browse"] = ["mlflow", "ui", "--backend-store-uri", address]
    is_default = store == "./store"
    location = [] if is_default else ["--store", store]
    commands["report"] = ["coldpress", "report", report.campaign, *location]
    published = [outcome.model for outcome in report.outcomes if outcome.version is not None]
    if not published:
        return commands
    model = published[0]
    commands["pull"] = ["coldpress", "pull", model, *location, "--dest", f"pulled/{model}"]
    argument = json.dumps(model)
    if not is_default:
        argument += f", store={json.dumps(store)}"
    commands["load"] = ["python", "-c", f"import freezer; print(freezer.load({argument}))"]
    return commands


def explain_plan(
    plan: Plan, skipped: Sequence[Outcome], records: BuildRecords, display: Display
) -> None:
    """Show a line for each item, and for each outcome that needs no work.

    Args:
        plan, skipped: of the campaign.
        records: builds that earlier campaigns finished.
        display: takes the lines.
    """
    lines = []
    for item in plan.items:
        why = "" if item.why == "unchanged" else f" ({item.why})"
        lines.append(f"{item.label()}: {_work_of(item, records)}{why}")
    for outcome in skipped:
        place = f"{outcome.model} {outcome.device_class}"
        lines.append(f"{place}: nothing ({outcome.coded_reason})")
    for line in lines:
        display.show(Event(kind="note", text=line))


def _work_of(item: Item, records: BuildRecords) -> str:
    """The work of an item in words: what the executor would start with."""
    if item.finished:
        return "unchanged"
    step = records.start(item)
    state = step.state
    outcome = state.outcome
    if outcome is not None:
        return f"nothing to build or judge; {outcome.verdict}: {outcome.coded_reason}"
    builds = [recipe for recipe in step.queue if recipe]
    words = []
    if builds:
        words.append(f"build {', '.join(builds)}")
    if state.waiting:
        words.append(
            f"then {', '.join(state.waiting)}, unless earlier judgements of the same architecture"
            " rule them out"
        )
    if state.built:
        words.append(f"keep {', '.join(state.built)}")
    for recipe, result in state.results.items():
        if result.is_skipped:
            problem = result.problem.removeprefix(f"{SKIPPED}: ")
            words.append(f"skip {recipe}: {problem}")
    words.append("judge if it is built" if item.missed and builds else "judge")
    return "; ".join(words)
