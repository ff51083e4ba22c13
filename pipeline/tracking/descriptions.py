"""Descriptions of campaigns, candidates, registered models and versions: Markdown for MLflow's
pages. Pure functions; no mlflow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from pipeline.records import (
    CandidateReport,
    Outcome,
    Row,
    Summary,
    rounded,
    summarize,
)
from pipeline.tracking.connection import MODELS

NOTE = "mlflow.note.content"
"""Tag of an experiment or run with its description, in Markdown."""

MAX_CHARS = 7500
"""Length of a description: MLflow cuts tags at 8000 characters."""

MAX_UNPUBLISHED = 15
"""Rows of the table of unpublished models."""

MAX_REASON_CHARS = 240


def campaign_description(outcomes: Sequence[Outcome], parameters: Mapping[str, str]) -> str:
    """Describe a campaign: counts, the largest gain and how to load it, what was not published and
    why.

    Args:
        outcomes: outcomes in the order of the catalog.
        parameters: versions and settings of the last pass; those of the run are of the first.
    """
    summary = summarize(outcomes)
    made_with = ", ".join(f"{name} {_code(text)}" for name, text in parameters.items())
    return _bounded(
        [
            _head(outcomes, summary),
            *_unpublished(summary),
            f"Made with {made_with}" if made_with else "",
        ]
    )


def _head(outcomes: Sequence[Outcome], summary: Summary) -> str:
    """Return the lines that MLflow's page shows before it is expanded."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary.counts.items())
    lines = [f"**{len(outcomes)} outcomes: {counts or 'none'}**"]
    if summary.gains:
        gain = summary.gains[0]
        load = _code(f"mlflow.pyfunc.load_model({json.dumps(_uri(gain), ensure_ascii=False)})")
        lines.append(
            f"Largest gain: {_model_link(gain)} for {gain.device_class},"
            f" **{gain.figures.speedup:.2f}×**. Load it: {load}"
        )
    return "  \n".join(lines)  # two spaces end a line within a paragraph


def _unpublished(summary: Summary) -> list[str]:
    rows = [
        (
            _code(item.model),
            ", ".join(item.device_classes),
            item.verdict,
            item.code,
            _cell(item.reason),
        )
        for item in summary.unpublished[:MAX_UNPUBLISHED]
    ]
    if not rows:
        return []
    head = ("model", "device classes", "verdict", "code", "reason")
    num_more = len(summary.unpublished) - MAX_UNPUBLISHED
    more = f"and {num_more} more, in `summary.json`" if num_more > 0 else ""
    return ["### Not published", _table(head, rows), more]


def candidate_description(outcome: Outcome, candidate: CandidateReport | None) -> str:
    """Describe a candidate's run: the outcome's verdict and reason, the candidate's problem, how to
    load it. Its metrics have the figures.

    Args:
        outcome: outcome of the model and class.
        candidate: the candidate; None if the outcome has none.
    """
    reason = f": {_cell(outcome.coded_reason)}" if outcome.coded_reason else ""
    parts = [f"{_code(outcome.model)} for {outcome.device_class}: **{outcome.verdict}**{reason}"]
    if candidate is None:
        return _bounded(parts)
    recipe = _code(candidate.recipe)
    if outcome.verdict == "published" and candidate.recipe == outcome.recipe:
        alias = _code(outcome.device_class)
        parts.append(f"{recipe}: published as {_model_link(outcome)}, alias {alias}.")
        parts.append(_load_snippet(outcome))
    elif candidate.problem:
        parts.append(f"{recipe}: Does not pass: {_cell(candidate.problem)}")
    else:
        parts.append(f"{recipe}: passes the gate.")
    return _bounded(parts)


def model_description(outcomes: Sequence[Outcome]) -> str:
    """Describe a registered model: the outcomes that its aliases serve, and how to load them.

    Args:
        outcomes: outcomes of one campaign and model.
    """
    published = [outcome for outcome in outcomes if outcome.verdict == "published"]
    first = (published or outcomes)[0]
    rows = [(_code(outcome.device_class), *_cells(outcome)) for outcome in outcomes]
    about = (
        f"Frozen by Coldpress from {_code(first.source)}. Each alias is a device class, and points"
        " to the artifact that serves it."
    )
    return _bounded([about, _table(("alias", *_COLUMNS), rows), _load_snippet(first)])


def version_description(outcome: Outcome, serving: str, store: str) -> str:
    """Describe a registered version: its figures when it was registered, and how to load it.

    Args:
        outcome: outcome that published it.
        serving: device class of the artifact.
        store: URI of the store that contains it.
    """
    row = Row.of(outcome)
    about = [f"{outcome.model} for {serving}"]  # plain text, for MLflow's list of versions
    about += [f"{row.mark}{row.speedup:.2f} times as fast as eager"] if row.speedup else []
    about += [f"error ratio {rounded(row.error_ratio)}"] if row.error_ratio is not None else []
    load = f"freezer.load({json.dumps(outcome.model)}, store={json.dumps(store)})"
    parts = [
        ", ".join(about),
        f"Frozen from {_code(outcome.source)}: {_code(str(outcome.artifact))}",
        _load_snippet(outcome),
        f"Without MLflow: `{load}`",
    ]
    return _bounded(parts)


_COLUMNS = ("verdict", "recipe", "speedup over eager", "median, ms", "error ratio")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of an outcome in tables."""
    row = Row.of(outcome)
    latency = f"{rounded(row.eager_p50_ms)} → {rounded(row.p50_ms)}" if row.p50_ms else ""
    speedup = f"{row.mark}{row.speedup:.2f}×" if row.speedup else ""
    return (row.verdict, row.recipe or "", speedup, latency, rounded(row.error_ratio))


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
    if len(text) <= MAX_CHARS:
        return text
    end = text.rindex("\n", 0, MAX_CHARS - 2)
    return f"{text[:end]}\n\n…"
