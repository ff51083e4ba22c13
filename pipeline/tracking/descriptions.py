"""Descriptions of campaigns, candidates, registered models and versions: Markdown for MLflow's
pages. Pure functions; no mlflow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from pipeline.records import CandidateReport, Outcome, Summary, summarize
from pipeline.tracking.connection import MODELS

MAX_CHARS = 7500
"""Length of a description: MLflow cuts tags at 8000 characters."""

MAX_UNPUBLISHED, MAX_OUTCOMES = 15, 30
"""Rows of a campaign's tables."""

_NUM_NAMED = 6
"""Unpublished models in the first lines."""

MAX_REASON_CHARS = 240


def campaign_description(outcomes: Sequence[Outcome], parameters: Mapping[str, str]) -> str:
    """Describe a campaign: counts, largest gains, how to load them, what was not published and why,
    all outcomes.

    Args:
        outcomes: in the order of the catalog.
        parameters: what the campaign was made with.
    """
    summary = summarize(outcomes)
    parts = [
        _head(outcomes, summary),
        *_gains(summary),
        *_unpublished(summary),
        *_all_outcomes(outcomes),
        (
            "Made with " + ", ".join(f"{name} {_code(text)}" for name, text in parameters.items())
            if parameters
            else ""
        ),
    ]
    return _bounded(parts)


def _head(outcomes: Sequence[Outcome], summary: Summary) -> str:
    """Return the lines that MLflow's page shows before it is expanded."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary.counts.items())
    lines = [f"**{len(outcomes)} outcomes: {counts or 'none'}**"]
    for one in summary.gains[:1]:
        load = _code(f"mlflow.pyfunc.load_model({json.dumps(_uri(one), ensure_ascii=False)})")
        lines.append(
            f"Largest gain: {_model_link(one)} for {one.device_class},"
            f" **{one.figures.speedup:.2f}×**. Load it: {load}"
        )
    named = list(
        dict.fromkeys(
            f"{_code(one.model)} ({one.code or one.verdict})" for one in summary.unpublished
        )
    )
    if named:
        lines.append(
            "Not published:"
            f" {', '.join(named[:_NUM_NAMED])}{', …' if len(named) > _NUM_NAMED else ''}"
        )
    return "  \n".join(lines)  # two spaces end a line within a paragraph


def _gains(summary: Summary) -> list[str]:
    if not summary.gains:
        return []
    rows = [
        (
            _model_link(one),
            one.device_class,
            f"**{one.figures.speedup:.2f}×**",
            _latency(one),
            one.recipe or "",
            _code(_uri(one)),
        )
        for one in summary.gains
    ]
    head = ("model", "device class", "speedup", "median, ms", "recipe", "load")
    return ["### Largest gains", _table(head, rows), _load_snippet(summary.gains[0])]


def _unpublished(summary: Summary) -> list[str]:
    rows = [
        (_code(one.model), ", ".join(one.device_classes), one.verdict, one.code, _cell(one.reason))
        for one in summary.unpublished[:MAX_UNPUBLISHED]
    ]
    if not rows:
        return []
    head = ("model", "device classes", "verdict", "code", "reason")
    return [
        "### Not published",
        _table(head, rows),
        _more(len(summary.unpublished), MAX_UNPUBLISHED),
    ]


def _all_outcomes(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [
        (
            _code(one.model),
            one.device_class,
            *_figures_row(one),
            _code(_uri(one)) if one.artifact else "",
        )
        for one in outcomes[:MAX_OUTCOMES]
    ]
    head = ("model", "device class", *_FIGURES_HEAD, "load")
    return ["### Outcomes", _table(head, rows), _more(len(outcomes), MAX_OUTCOMES)] if rows else []


def candidate_description(outcome: Outcome, candidate: CandidateReport | None) -> str:
    """Describe a candidate's run: the outcome's verdict and reason, the candidate's figures and
    problem, how to load it.

    Args:
        outcome: of the model and class.
        candidate: None if the outcome has no candidates.
    """
    winner = (
        candidate is not None
        and outcome.verdict == "published"
        and candidate.recipe == outcome.recipe
    )
    reason = f": {_cell(outcome.coded_reason)}" if outcome.coded_reason else ""
    parts = [f"{_code(outcome.model)} for {outcome.device_class}: **{outcome.verdict}**{reason}"]
    if candidate is not None:
        state = (
            "Published."
            if winner
            else (
                f"Does not pass: {_cell(candidate.problem)}"
                if candidate.problem
                else "Passes the gate."
            )
        )
        parts += [f"{_code(candidate.recipe)}: {state}", _candidate_figures(outcome, candidate)]
    if winner:
        parts += [
            f"Registered as {_model_link(outcome)}, alias {_code(outcome.device_class)}.",
            _load_snippet(outcome),
        ]
    return _bounded(parts)


def _candidate_figures(outcome: Outcome, candidate: CandidateReport) -> str:
    figures = candidate.figures
    own, eager = figures.latency_ms, outcome.figures.latency_ms
    drift = figures.drift
    low, high = figures.speedup_ci or (None, None)
    interval = (
        f" (95% interval {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    )
    rows = [
        ("speedup over eager", f"{_number(figures.speedup)}{interval}" if figures.speedup else ""),
        (
            "median, ms",
            (f"{_number(own.p50)} (eager {_number(eager.eager_p50)})" if own.p50 else ""),
        ),
        ("error ratio (1 is eager's own error)", _number(drift.error_ratio)),
        ("largest absolute error", _number(drift.max_abs_err)),
        ("size, MB", _number(candidate.size_bytes / 1e6) if candidate.num_payloads else ""),
        ("build, s", f"{candidate.build_s:.1f}" if candidate.build_s else ""),
    ]
    return _table(("figure", candidate.recipe), [row for row in rows if row[1]])


def model_description(outcomes: Sequence[Outcome]) -> str:
    """Describe a registered model: the outcomes that its aliases serve, and how to load them.

    Args:
        outcomes: of one campaign and model.
    """
    first = next((one for one in outcomes if one.verdict == "published"), outcomes[0])
    rows = [(_code(one.device_class), *_figures_row(one)) for one in outcomes]
    parts = [
        (
            f"Frozen by Coldpress from {_code(first.source)}. Each alias is a device class, and"
            " points to the artifact that serves it."
        ),
        _table(("alias", *_FIGURES_HEAD), rows),
        _load_snippet(first),
    ]
    return _bounded(parts)


def version_description(outcome: Outcome, serving: str, store: str) -> str:
    """Describe a registered version: its figures when it was registered, and how to load it.

    Args:
        outcome: that published it.
        serving: device class of the artifact.
        store: that contains it.
    """
    figures, ratio = outcome.figures, outcome.figures.drift.error_ratio
    measured = [f"{figures.speedup:.2f} times as fast as eager"] if figures.speedup else []
    measured += [f"error ratio {ratio:.3g}"] if ratio is not None else []
    parts = [
        ", ".join(
            [f"{outcome.model} for {serving}", *measured]
        ),  # in plain text, for MLflow's list of versions
        f"Frozen from {_code(outcome.source)}: {_code(str(outcome.artifact))}",
        _table(_FIGURES_HEAD, [_figures_row(outcome)]),
        _load_snippet(outcome),
        f"Without MLflow: `freezer.load({json.dumps(outcome.model)}, store={json.dumps(store)})`",
    ]
    return _bounded(parts)


_FIGURES_HEAD = ("verdict", "recipe", "speedup over eager", "median, ms", "error ratio")


def _figures_row(outcome: Outcome) -> tuple[str, ...]:
    figures = outcome.figures
    speedup = f"{figures.speedup:.2f}×" if figures.speedup else ""
    ratio = _number(figures.drift.error_ratio)
    return outcome.verdict, outcome.recipe or "", speedup, _latency(outcome), ratio


def _latency(outcome: Outcome) -> str:
    latency = outcome.figures.latency_ms
    if not latency.p50:
        return ""
    return f"{_number(latency.eager_p50)} → {_number(latency.p50)}"


def _uri(outcome: Outcome) -> str:
    return f"{MODELS}{outcome.registered_as}@{outcome.device_class}"


def _load_snippet(outcome: Outcome) -> str:
    uri = json.dumps(_uri(outcome), ensure_ascii=False)
    lines = (
        "```python",
        "import mlflow",
        "",
        f"model = mlflow.pyfunc.load_model({uri})",
        "outputs = model.predict(inputs)",
        "```",
    )
    return "\n".join(lines)


def _model_link(outcome: Outcome) -> str:
    return f"[{_cell(outcome.model)}](#/models/{quote(outcome.registered_as, safe='')})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; MLflow's pages put no space between its columns."""
    lines = (f"| {' &ensp; | '.join(row)} |" for row in (head, *rows))
    return "\n".join([next(lines), "|" + " :--- |" * len(head), *lines])


def _more(count: int, shown: int) -> str:
    return f"and {count - shown} more, in `summary.json`" if count > shown else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', chr(39))}`"


def _cell(text: str | None) -> str:
    """Return a text for a line or a table's cell, without Markdown or HTML of its own."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", _line(text or "")).replace("<", "&lt;")


def _line(text: str) -> str:
    """Return a text in one line without `|`, cut to MAX_REASON_CHARS."""
    line = " ".join(text.split()).replace("|", "¦")
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 1]}…"


def _bounded(parts: Iterable[str]) -> str:
    """Join paragraphs; of a longer text keep whole lines up to MAX_CHARS."""
    text = "\n\n".join(part for part in parts if part)
    return (
        text if len(text) <= MAX_CHARS else f"{text[: text.rindex(chr(10), 0, MAX_CHARS - 2)]}\n\n…"
    )
