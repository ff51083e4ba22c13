"""Report of a freeze as a Markdown page. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from freezer.artifact.describe_report import (
    constants_text,
    figures_text,
    instructions_text,
    kinds_by_number,
    listed,
    migration_text,
    operators_text,
    phases_text,
    size_text,
    strides_text,
)
from freezer.artifact.freezing_report import Change, FreezingReport
from freezer.artifact.manifest import Manifest
from freezer.artifact.sections import Migration

MAX_KINDS = 40
"""Kinds of operators in a table; the rest is counted."""


FREEZING = "freezing.md"
"""File name of the page."""


def manifest_markdown(manifest: Manifest) -> str | None:
    """The page of an artifact; None for a manifest of an earlier release without reports."""
    recipe, freezing = manifest.recipe, manifest.freezing
    if not freezing.reports:
        return None
    speedup = manifest.latency.speedup if manifest.latency else None
    return freezing_markdown(
        title=f"{manifest.model} for {manifest.device_class}, {recipe.name}",
        verdict=f"{manifest.verdict}: {figures_text(speedup, manifest.drift.error_ratio)}",
        tried=recipe.tried,
        reports=freezing.reports,
        strides_equal=freezing.strides_equal,
        migration=freezing.migration,
    )


def freezing_markdown(
    *,
    title: str,
    verdict: str,
    tried: Sequence[Mapping[str, str]],
    reports: Mapping[str, FreezingReport],
    strides_equal: bool | None,
    migration: Migration | None = None,
) -> str:
    """The page of one candidate.

    Args:
        title: model, device class and recipe.
        verdict: of the candidate, in a sentence.
        tried: the attempts, in order.
        reports: by payload path.
        strides_equal: whether outputs have eager's strides; None: not compared.
        migration: of a TorchScript model.
    """
    lines = [f"# What freezing did: {title}", "", verdict, ""]
    if tried:
        head = ("payload", "capture", "lowering", "outcome")
        lines += _table(head, [[_cell(row.get(name, "")) for name in head] for row in tried])
    if strides_equal is not None:
        lines += [f"Strides {strides_text(strides_equal)}.", ""]
    if migration is not None:
        text = migration_text(migration)
        lines += [f"{text[0].upper()}{text[1:]}.", ""]
    for path, report in reports.items():
        lines += [f"## {path}", "", *_report(report)]
    return "\n".join(lines).rstrip() + "\n"


def _report(report: FreezingReport) -> Iterator[str]:
    before, after = size_text(report.size_before_bytes), size_text(report.size_after_bytes)
    yield f"- operators: {operators_text(report)}"
    yield f"- size: {before} of parameters and buffers -> {after}"
    if report.num_constants or report.folded_bytes:
        yield f"- became constants: {constants_text(report)}" + (f" ({_names(report.constants)})" if report.constants else "")
    if report.unused:
        yield f"- read by no call, and left out: {_names(report.unused)}"
    if report.instructions_of:
        yield f"- instructions: {instructions_text(report)}"
    if report.phases_s:
        yield f"- time: {phases_text(report)}"
    if report.memory_peak_bytes is not None:
        yield f"- peak memory of the build: {size_text(report.memory_peak_bytes)}"
    yield from (f"- inputs must hold to: {guard}" for guard in report.guards)
    yield from (f"- {note}" for note in report.notes)
    yield ""
    yield from _changes("done", report.changes)
    yield from _changes("done at load, on the machine that serves (as counted where it was built)", report.changes_at_load)
    stays = {item.name: (f"{item.kind} `{item.name}`", item.why) for item in report.preserved}
    stays |= {item.name: (f"`{item.name}`", item.reason) for item in report.kept if item.name not in stays}
    if stays:
        yield from _table(("stays", "why"), [[name, _cell(why)] for name, why in stays.values()])
    yield from _operators(report)


def _changes(heading: str, changes: Sequence[Change]) -> Iterator[str]:
    if changes:
        rows = [[change.name + (f" ({_cell(change.note)})" if change.note else ""), str(change.count)] for change in changes]
        yield from _table((heading, "count"), rows)


def _operators(report: FreezingReport) -> Iterator[str]:
    kinds = kinds_by_number(report)
    rows = [[f"`{kind}`", str(before), str(after)] for kind, before, after in kinds[:MAX_KINDS]]
    rest = kinds[MAX_KINDS:]
    if rest:
        rows.append([f"{len(rest)} others", str(sum(item[1] for item in rest)), str(sum(item[2] for item in rest))])
    if not rows:
        return
    if report.ops_before == report.ops_after:
        yield from _table(("operator", "number"), [row[:2] for row in rows])
    else:
        yield from _table(("operator", "before", "after"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def _names(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
