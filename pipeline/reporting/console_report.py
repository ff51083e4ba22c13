"""What people read of a campaign besides its display: at its end a table of verdicts and reasons;
with `--explain`, what it would do with each item, and why.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlparse

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freezer.artifact import ERROR_RATIO
from freezer.errors import without_credentials
from freezer.files import SCHEMES
from freezer.hardware import PORTABLE
from freezer.store import one_spelling
from pipeline.planning import Item, Plan
from pipeline.records import (
    SKIPPED,
    STYLES,
    Outcome,
    Outcomes,
    Row,
    alike,
    counts_text,
    rounded,
    verdict_name,
)
from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.display import Display
from pipeline.scheduling import BuildRecords
from pipeline.tracking import gains_link
from pipeline.workspace import log_place

WIDE = 140
"""Columns of a terminal from which tables show everything."""

NUM_NAMES = 4
"""Columns of a table with words; figures follow."""


def result_table(
    names: Sequence[str],
    rows: Iterable[Sequence[Text | str]],
    console: Console,
    *,
    narrow: int,
    title: str | None = None,
) -> Table:
    """Return a table, with the first `narrow` columns alone on a terminal that is not WIDE."""
    shown = len(names) if console.width >= WIDE else narrow
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, name in enumerate(names[:shown]):
        table.add_column(name, overflow="fold", no_wrap=place not in (0, 2))
        if place >= NUM_NAMES:
            table.columns[-1].justify = "right"
    for cells in rows:
        table.add_row(*cells[:shown])
    return table


def _browse(tracking_uri: str, experiment_id: str) -> Iterable[str]:
    """Yield the link to the gains on MLflow's pages; before it, for a database, the command that
    serves them, without the processes for jobs.
    """
    server = without_credentials(tracking_uri)
    if not server.startswith("http"):
        yield f"{WITHOUT_JOBS} mlflow ui --workers 1 --backend-store-uri {shlex.quote(server)}"
        server = "http://127.0.0.1:5000"
    yield gains_link(server, experiment_id)


WITHOUT_JOBS = "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"
"""With it, `mlflow ui` takes 2 processes instead of 15."""


UNEXPLAINED = ("crash", "timeout", "memory", "output", "error")
"""Failures that are printed with the end of their log, since the reason alone does not explain
them.
"""

MAX_LOG_LINES = 8

COLUMNS = (
    *("model", "device class", "verdict", "recipe"),
    *("speedup (95% CI)", "p50 ms", "eager ms", "error ratio", "version", "build s", "judge s"),
)


def print_report(
    report: CampaignReport,
    console: Console,
    store: str = "./store",
    tracking_uri: str = "",
) -> None:
    """Print the table of verdicts, failures first, and below it reasons, logs and warnings.

    Args:
        report: the report to print.
        console: console to print on.
        store: URI of the store, which has the logs.
        tracking_uri: URI of MLflow.
    """
    outcomes = sorted(report.outcomes, key=lambda outcome: not outcome.failed)
    console.print(Text(f"campaign {report.campaign}", style="italic"))
    if outcomes:
        rows = map(_cells, outcomes)
        console.print(result_table(COLUMNS, rows, console, narrow=NUM_NAMES + 1))
        if console.width >= WIDE:
            console.print(Text(f"error ratio: {ERROR_RATIO}", style="dim"), soft_wrap=True)
    for line in (
        *_reasons(outcomes, store),
        *_warnings(outcomes),
        *(Text(failure, style="red") for failure in report.infrastructure),
        Text(_summary(report, outcomes)),
    ):
        console.print(line, soft_wrap=True)
    if report.experiment_id:
        for step in _browse(tracking_uri, report.experiment_id):
            console.print(Text(f"try next: {step}"), soft_wrap=True)


def _cells(outcome: Outcome) -> list[Text | str]:
    row, kind = Row.of(outcome), outcome.failure_kind
    verdict = f"{row.verdict}: {kind}" if kind else verdict_name(outcome)
    seconds = [f"{row.build_s:.1f}", f"{row.judge_s:.1f}"]
    return [
        row.model,
        row.device_class,
        Text(verdict, STYLES.get(row.verdict, "")),
        row.recipe or "",
        row.speedup_text,
        rounded(row.p50_ms),
        rounded(row.eager_p50_ms),
        "" if row.error_ratio is None else f"{row.error_ratio:.2f}",
        str(row.version or ""),
        *(["unchanged", ""] if row.cached else seconds),
    ]


def _reasons(outcomes: Iterable[Outcome], store: str) -> Iterable[Text]:
    """Yield why outcomes are unpublished, or slower than eager somewhere, with their logs; one line
    for equal reasons of a model.
    """
    shown = [one for one in outcomes if one.verdict != "published" or _is_slow_somewhere(one)]
    for group in alike(one for one in shown if one.reason):
        first = group[0]
        classes = ", ".join(outcome.device_class for outcome in group)
        yield Text.assemble((f"{first.model} {classes}: ", "bold"), first.coded_reason or "")
        if first.failure_kind in UNEXPLAINED:
            for line in first.log_tail.splitlines()[-MAX_LOG_LINES:]:
                yield Text(f"    {line}", style="dim")
        for log in sorted({log for outcome in group for log in _logs(outcome, store)}):
            yield Text(f"    log: {log}")


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
    """Yield the warnings of captures of published outcomes, each once for a model."""
    published = [outcome for outcome in outcomes if outcome.verdict == "published"]
    found = [(outcome.model, warning) for outcome in published for warning in outcome.warnings]
    for model, warning in dict.fromkeys(found):
        yield Text.assemble((f"{model}: ", "bold"), (f"warning: {warning}", "yellow"))


def _summary(report: CampaignReport, outcomes: Outcomes) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    line = counts_text(counts.items()) or "no outcome"
    unchanged = sum(outcome.cached for outcome in outcomes)
    if unchanged:
        line += f" ({unchanged} unchanged)"
    line += f" in {report.finished - report.started:.0f} s"
    if report.interrupted:
        line += (
            f"; interrupted: {len(outcomes)} outcomes and {report.num_builds} builds are kept, run"
            " the same command to continue"
        )
    return line


def explain_plan(
    plan: Plan,
    skipped: Outcomes,
    records: BuildRecords,
    display: Display,
) -> None:
    """Show a line for each item, and for each outcome that needs no work.

    Args:
        plan, skipped: of the campaign.
        records: builds that earlier campaigns finished.
        display: takes the lines.
    """
    for item in plan.items:
        why = "" if item.why == "unchanged" else f" ({item.why})"
        display.note(f"{item.label()}: {_work_of(item, records)}{why}")
    for outcome in skipped:
        display.note(f"{' '.join(outcome.place)}: nothing ({outcome.coded_reason})")


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
