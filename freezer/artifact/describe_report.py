"""Describe in words what freezing did: rows of `coldpress inspect`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from freezer.artifact.freezing_report import NOT_TRIED, Change, FreezingReport
from freezer.artifact.sections import CandidateRecord, FreezingRecord, Migration, RecipeRecord

MAX_KINDS = 8
"""Kinds of operators in a row; the rest is counted."""

MAX_NAMES = 8
"""Names in a row; the rest is counted."""

_CUT = re.compile(r"`?and (\d+) more`?")


def describe_freezing(freezing: FreezingRecord, recipe: RecipeRecord) -> Iterator[tuple[str, str]]:
    """Rows of names and values about a freeze, from two sections of a manifest."""
    for row in recipe.tried:
        if not row["outcome"].startswith(NOT_TRIED):
            yield "tried", tried_text(row)
    for path, report in freezing.reports.items():
        if len(freezing.reports) > 1:
            yield "frozen", path
        yield from describe_report(report)
    if freezing.reports:
        yield "strides", strides_text(freezing.strides_equal)
    for other in freezing.candidates:
        yield "candidate", _other(other)
    for name, why in freezing.failures.items():
        yield "not built", f"{name}: {why}"
    if freezing.migration:
        yield "migration", migration_text(freezing.migration)


def describe_report(report: FreezingReport) -> Iterator[tuple[str, str]]:
    """Rows of names and values of one payload's report."""
    yield "operators", f"{operators_text(report)}: {_kinds(report)}"
    for name, changes in (("done", report.changes), ("done at load", report.changes_at_load)):
        if changes:
            yield name, "; ".join(change_text(change) for change in changes)
    if report.num_constants:
        yield "constants", f"{constants_text(report)}: {listed(report.constants)}"
    elif report.folded_bytes:
        yield "constants", constants_text(report)
    preserved = {item.name for item in report.preserved}
    for item in report.preserved:
        yield "stays", f"{item.kind} {item.name}: {item.why}"
    for kept in report.kept:
        if kept.name not in preserved:
            yield "stays", f"{kept.name}: {kept.reason}"
    if report.unused:
        yield "unused", listed(report.unused)
    yield "size", f"{size_text(report.size_before_bytes)} of parameters and buffers -> {size_text(report.size_after_bytes)}"
    yield from _built(report)
    for guard in report.guards:
        yield "guard", guard
    for note in report.notes:
        yield "note", note


def _built(report: FreezingReport) -> Iterator[tuple[str, str]]:
    """Instructions of the payload, and time and memory of the build."""
    if report.instructions_of:
        yield "instructions", instructions_text(report)
    if report.phases_s:
        yield "time", phases_text(report)
    if report.memory_peak_bytes is not None:
        yield "build memory", f"peak {size_text(report.memory_peak_bytes)}"


def tried_text(row: Mapping[str, str]) -> str:
    """One attempt, in a line."""
    return (
        f"{row['payload']}: {row['capture']} -> {row['lowering']}: {row['outcome']}"
        if "payload" in row
        else ", ".join(row.values())
    )


def operators_text(report: FreezingReport) -> str:
    """Number of operators before and after."""
    before, after = sum(report.ops_before.values()), sum(report.ops_after.values())
    return f"{before}, as before" if report.ops_before == report.ops_after else f"{before} -> {after}"


def change_text(change: Change) -> str:
    """A change with its count and note."""
    return f"{change.name} {change.count}" + (f" ({change.note})" if change.note else "")


def constants_text(report: FreezingReport) -> str:
    """Number and size of constants, and size of folded ones."""
    folded = f"; folding computed {size_text(report.folded_bytes)} of new constants" if report.folded_bytes else ""
    return f"{report.num_constants} parameters and buffers, {size_text(report.constants_bytes)}{folded}"


def instructions_text(report: FreezingReport) -> str:
    """Instruction families of the payload, and the class they were checked against."""
    return f"{' '.join(sorted(report.instructions)) or 'baseline only'} (of {report.instructions_of})"


def phases_text(report: FreezingReport) -> str:
    """Seconds of each phase, capture first and report last; JSON keeps no order."""
    phases = sorted(report.phases_s.items(), key=lambda item: (item[0] == "report", item[0] != "capture", item[0]))
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)


def migration_text(migration: Migration) -> str:
    """Effect of moving a TorchScript model to torch.export, in a sentence."""
    if not migration.possible:
        return f"the TorchScript is not converted to an exported program: {migration.reason}"
    if migration.against is None:
        return f"converted to an exported program, {migration.recipe} passes; no frozen TorchScript to compare with"
    faster = "was not timed"
    if migration.gain and migration.gain_ci:
        low, high = migration.gain_ci
        faster = f"is {migration.gain:.2f} times as fast as {migration.against} ({low:.2f} to {high:.2f})"
    worst, relative = migration.max_abs_diff, migration.relative_rms_diff
    apart = "their shapes differ" if worst is None else f"the two are at most {worst:.3g} apart"
    apart += f", rms {relative:.3g} of the output" if relative is not None else ""
    return f"converted to an exported program, {migration.recipe} {faster}; {apart}"


def strides_text(equal: bool | None) -> str:
    """Whether outputs have eager's strides."""
    if equal is None:
        return "not compared with eager's"
    return "of all outputs equal to eager's" if equal else "of an output differ from eager's"


def size_text(num_bytes: int) -> str:
    """A size in a fitting unit."""
    if num_bytes < 1e3:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def listed(names: Sequence[str]) -> str:
    """The first names and the number of the others, including those that a shortened report counts in its last item."""
    cut = _CUT.fullmatch(names[-1]) if names else None
    hidden = max(len(names) - MAX_NAMES, 0) + (int(cut[1]) - 1 if cut else 0)
    return ", ".join(names[:MAX_NAMES]) + (f" and {hidden} more" if hidden else "")


def kinds_by_number(report: FreezingReport) -> list[tuple[str, int, int]]:
    """Kind, number before and number after of operators; most frequent first."""
    before, after = report.ops_before, report.ops_after
    found = [(kind, before.get(kind, 0), after.get(kind, 0)) for kind in {**before, **after}]
    return sorted(found, key=lambda item: (-max(item[1:]), item[0]))


def _kinds(report: FreezingReport) -> str:
    kinds = kinds_by_number(report)
    parts = [f"{kind} {one}" + (f" -> {other}" if other != one else "") for kind, one, other in kinds[:MAX_KINDS]]
    rest = kinds[MAX_KINDS:]
    if rest:
        before, after = sum(one for _, one, _ in rest), sum(other for _, _, other in rest)
        changed = f" -> {after}" if after != before else ""
        parts.append(f"{len(rest)} other kind{'s' if len(rest) > 1 else ''} {before}{changed}")
    return ", ".join(parts)


def _other(candidate: CandidateRecord) -> str:
    """A candidate that did not win: its problem, or its figures."""
    made = f"{candidate.recipe} ({candidate.capture} -> {candidate.lowering}, {size_text(candidate.size_bytes)})"
    return f"{made}: {candidate.problem or 'passes, ' + figures_text(candidate.speedup, candidate.error_ratio)}"


def figures_text(speedup: float | None, error_ratio: float | None) -> str:
    """Figures of a candidate that passes the gate."""
    speed = "not timed" if speedup is None else f"speedup {speedup:.2f} over eager"
    return speed if error_ratio is None else f"{speed}, error ratio {error_ratio:.2f}"
