"""Describe artifacts for people: rows of `coldpress inspect`, the page freezing.md, code and
graphs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from freezer.artifact.folder import Artifact
from freezer.artifact.freezing_report import FreezingReport
from freezer.artifact.latency import LatencyRecord, PointFigures, place_text
from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.sections import NOT_TRIED, FreezingRecord, Tradeoff
from freezer.errors import NotPublishedError
from freezer.spec import CLOCKS, Dim

FREEZING = "freezing.md"
"""File name of the page."""

MAX_SHOWN = 12
"""Most names or kinds of operators in a row."""

_Row = tuple[str, str]
"""Name and value of one row."""


def describe(manifest: Manifest, published: Sequence[str] = ()) -> Iterator[_Row]:
    """Rows that describe an artifact.

    Args:
        manifest: of the artifact.
        published: all device classes of its version, if it comes from a store.
    """
    version = f"version {manifest.version}" if manifest.version is not None else "not published"
    yield "model", f"{manifest.model}, {version}"
    yield (
        "device class",
        manifest.device_class + (f" (published: {', '.join(published)})" if published else ""),
    )
    yield "verdict", manifest.verdict
    if manifest.gate.objective != "p50":
        yield "objective", manifest.gate.objective
    yield (
        "recipe",
        f"{manifest.recipe.name}: {manifest.recipe.capture} -> {manifest.recipe.lowering}",
    )
    yield from _contract(manifest)
    for payload in manifest.payloads:
        threads = place_text(payload.num_threads, {}) if payload.num_threads else "any thread count"
        yield (
            "payload",
            ", ".join(
                [
                    f"{payload.path}: {size_text(payload.size_bytes)}",
                    threads,
                    *map(_sizes, payload.dims),
                ]
            ),
        )
    ratio = manifest.drift.error_ratio
    yield (
        "drift",
        (
            "equal to eager"
            if ratio is None
            else f"error ratio {ratio:.2f} against {manifest.reference}"
        ),
    )
    if manifest.latency:
        yield from _latency(manifest.latency)
    for item in manifest.freezing.dropped:
        yield "left out", f"{item.payload}: {item.reason}"
    yield from describe_freezing(manifest.freezing, manifest.recipe.tried)
    yield (
        "made with",
        ", ".join(f"{name} {value}" for name, value in manifest.toolchain.items() if value),
    )
    made = manifest.provenance
    yield (
        "source",
        f"{made.get('source', 'unknown')}, weights {str(made.get('weights', 'unknown'))[:19]}…",
    )


def describe_freezing(
    freezing: FreezingRecord, tried: Sequence[Mapping[str, str]]
) -> Iterator[_Row]:
    """Rows about a freeze and its attempts."""
    for row in tried:
        payload, capture, lowering, outcome = (
            row.get(key, "unknown") for key in ("payload", "capture", "lowering", "outcome")
        )
        if not outcome.startswith(NOT_TRIED):
            yield "tried", f"{payload}: {capture} -> {lowering}: {outcome}"
    for warning in freezing.warnings:
        yield "warning", warning
    for path, report in freezing.reports.items():
        if len(freezing.reports) > 1:
            yield "frozen", path
        yield from _report(report)
    if freezing.reports:
        results = {
            None: "not compared with eager's",
            True: "of all outputs equal to eager's",
            False: "of an output differ from eager's",
        }
        yield "strides", results[freezing.strides_equal]
    for other in freezing.candidates:
        made = (
            f"{other.recipe} ({other.capture} -> {other.lowering}, {size_text(other.size_bytes)})"
        )
        yield (
            "candidate",
            (
                f"{made}:"
                f" {other.problem or 'passes, ' + figures_text(other.speedup, other.error_ratio)}"
            ),
        )
    for item in freezing.pareto if len(freezing.pareto) > 1 else ():
        yield "pareto", _tradeoff(item)
    for name, why in freezing.failures.items():
        yield "not built", f"{name}: {why}"


def _tradeoff(item: Tradeoff) -> str:
    figures = (
        ("p50 {:.3g} ms", item.p50_ms),
        ("p95 {:.3g} ms", item.p95_ms),
        ("{:.4g} items/s", item.items_per_s),
        ("{:.3g} ms to load", item.load_ms),
        ("{:.1f} MB of memory", item.memory_mb),
        ("{:.1f} MB in size", item.size_mb),
    )
    return (
        f"{item.recipe}:"
        f" {', '.join(text.format(value) for text, value in figures if value is not None)}"
    )


def freezing_markdown(
    *, title: str, verdict: str, tried: Sequence[Mapping[str, str]], freezing: FreezingRecord
) -> str:
    """The page of one candidate, as Markdown.

    Args:
        title: model, device class and recipe.
        verdict: of the candidate, in a sentence.
        tried: the attempts, in order.
        freezing: what freezing did.
    """
    cells = (
        (name, " ".join(value.split()).replace("|", "\\|"))
        for name, value in describe_freezing(freezing, tried)
    )
    rows = [f"| {name} | {value} |" for name, value in cells]
    return "\n".join(
        [f"# What freezing did: {title}", "", verdict, "", "| | |", "|---|---|", *rows, ""]
    )


def manifest_markdown(manifest: Manifest) -> str | None:
    """The page of an artifact; None for a manifest of an earlier release without reports."""
    if not manifest.freezing.reports:
        return None
    speedup = manifest.latency.speedup if manifest.latency else None
    return freezing_markdown(
        title=f"{manifest.model} for {manifest.device_class}, {manifest.recipe.name}",
        verdict=f"{manifest.verdict}: {figures_text(speedup, manifest.drift.error_ratio)}",
        tried=manifest.recipe.tried,
        freezing=manifest.freezing,
    )


def figures_text(speedup: float | None, error_ratio: float | None) -> str:
    """Figures of a candidate that passes the gate."""
    speed = "not timed" if speedup is None else f"speedup {speedup:.2f} over eager"
    return speed if error_ratio is None else f"{speed}, error ratio {error_ratio:.2f}"


def readable(artifact: Artifact, kind: str, *, captured: bool) -> str:
    """The code or graph of every payload, under its path if there are several.

    Args:
        artifact: whose texts are verified and read.
        kind: `code` or `graph`.
        captured: of the captured model instead of the frozen one.

    Raises:
        NotPublishedError: the artifact has no such text.
        IntegrityError: a text is damaged.
    """
    parts = []
    for payload in artifact.manifest.payloads:
        text = _text(artifact, payload, kind, captured=captured)
        parts.append(f"# {payload.path}\n{text}" if len(artifact.manifest.payloads) > 1 else text)
    return "\n".join(parts)


def _text(artifact: Artifact, payload: Payload, kind: str, *, captured: bool) -> str:
    stem = f"evidence/{PurePosixPath(payload.path).stem}"
    names = [f"{stem}-captured-{kind}.txt"]
    if not captured:  # the captured program is served only if nothing was frozen
        names = [f"{stem}-{kind}.txt"] + (
            [] if artifact.manifest.recipe.settings.get("freeze", True) else names
        )
    for item in artifact.manifest.files:
        if item.path in names:
            artifact.verify((item,))
            return (artifact.folder / item.path).read_text(errors="replace")
    raise NotPublishedError(
        f"{artifact.manifest.model} for {artifact.manifest.device_class} contains no {names[0]};"
        " earlier releases and some recipes write none: freeze the model again"
    )


def _contract(manifest: Manifest) -> Iterator[_Row]:
    spec = manifest.inputs
    for tensor in spec.tensors:
        yield (
            "input",
            f"{tensor.name}: {tensor.dtype} [{', '.join(str(size) for size in tensor.shape)}]",
        )
    for name, value in spec.constants.items():
        yield "constant", f"{name} = {value!r}"
    if spec.dims:
        yield "dims", ", ".join(_sizes(dim) for dim in spec.dims)
    for output in manifest.outputs:
        yield "output", f"{output.name}: {output.dtype}, rank {output.rank}"


def _latency(latency: LatencyRecord) -> Iterator[_Row]:
    threads = f", {place_text(latency.num_threads, {})}" if latency.num_threads else ""
    yield "speed", _speed(latency.ms.get("p50"), latency.eager_ms.get("p50"), latency) + threads
    if latency.cold_start is not None:
        cold = latency.cold_start
        times = f"opens in {cold.open_ms:.0f} ms, first call {cold.first_call_ms:.1f} ms"
        yield "cold start", f"{times}, peak {cold.memory_peak_mb:.0f} MB"
    for item in latency.points if len(latency.points) > 1 else ():
        speed = (
            "calls take too long to measure"
            if item.verdict == "not measured"
            else _speed(item.p50, item.eager_p50, item)
        )
        yield (
            "point",
            f"{item.place}: {item.payload}, {speed}"
            + (f", {item.verdict}" if item.speedup and item.verdict else ""),
        )


def _speed(p50: float | None, eager: float | None, figures: LatencyRecord | PointFigures) -> str:
    parts = [] if p50 is None or eager is None else [f"p50 {p50:.3g} ms", f"eager {eager:.3g} ms"]
    if figures.speedup is not None and figures.speedup_ci is not None:
        low, high = figures.speedup_ci
        parts.append(
            f"{figures.speedup:.2f}x ({low:.2f} to {high:.2f}) {CLOCKS[figures.clock]}".rstrip()
        )
    return ", ".join(parts) or "too disturbed to measure"


def _report(report: FreezingReport) -> Iterator[_Row]:
    """Rows of one payload's report."""
    yield "operators", _operators(report)
    for name, changes in (("done", report.changes), ("done at load", report.changes_at_load)):
        if changes:
            yield (
                name,
                "; ".join(
                    f"{item.name} {item.count}" + (f" ({item.note})" if item.note else "")
                    for item in changes
                ),
            )
    if report.num_constants or report.folded_bytes:
        folded = (
            f"; folding computed {size_text(report.folded_bytes)} of new constants"
            if report.folded_bytes
            else ""
        )
        made = (
            f"{report.num_constants} parameters and buffers,"
            f" {size_text(report.constants_bytes)}{folded}"
        )
        yield "constants", f"{made}: {_listed(report.constants)}"
    preserved = {item.name for item in report.preserved}
    for item in report.preserved:
        yield "stays", f"{item.kind} {item.name}: {item.why}"
    for kept in report.kept:
        if kept.name not in preserved:
            yield "stays", f"{kept.name}: {kept.reason}"
    if report.unused:
        yield "unused", _listed(report.unused)
    yield (
        "size",
        (
            f"{size_text(report.size_before_bytes)} of parameters and buffers ->"
            f" {size_text(report.size_after_bytes)}"
        ),
    )
    if report.instructions_of:
        yield (
            "instructions",
            (
                f"{' '.join(sorted(report.instructions)) or 'baseline only'} (of"
                f" {report.instructions_of})"
            ),
        )
    if report.phases_s:
        yield (
            "time",
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.phases_s.items()),
        )
    if report.memory_peak_bytes is not None:
        yield "build memory", f"peak {size_text(report.memory_peak_bytes)}"
    yield from (("guard", guard) for guard in report.guards)
    yield from (("note", note) for note in report.notes)


def _operators(report: FreezingReport) -> str:
    """Numbers before and after: of all operators, and of each kind, most frequent first."""
    before, after = report.ops_before, report.ops_after

    def change(old: int, new: int) -> str:
        return str(old) if old == new else f"{old} -> {new}"

    numbers = {
        kind: (before.get(kind, 0), after.get(kind, 0)) for kind in sorted({*before, *after})
    }
    kinds = sorted(numbers, key=lambda kind: -max(numbers[kind]))
    return (
        f"{change(sum(before.values()), sum(after.values()))}:"
        f" {_listed([f'{kind} {change(*numbers[kind])}' for kind in kinds])}"
    )


def _sizes(dim: Dim) -> str:
    return f"{dim.name} {dim.min}" if dim.min == dim.max else str(dim).replace(" from ", " ", 1)


def size_text(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_SHOWN], *(["…"] if len(names) > MAX_SHOWN else [])])
