"""Describe artifacts for people: rows of `coldpress inspect`, the page freezing.md, code and
graphs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from freezer.artifact.folder import Artifact
from freezer.artifact.freezing_report import Change, FreezingReport
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

_TEXTS = {
    "model": "{0.model}, version {0.version}",
    "recipe": "{0.name}: {0.capture} -> {0.lowering}",
    "input": "{0.name}: {0.dtype} [{1}]",
    "constant": "{} = {!r}",
    "output": "{0.name}: {0.dtype}, rank {0.rank}",
    "drift": "error ratio {0.drift.error_ratio:.2f} against {0.reference}",
    "cold start": (
        "opens in {0.open_ms:.0f} ms, first call {0.first_call_ms:.1f} ms,"
        " peak {0.memory_peak_mb:.0f} MB"
    ),
    "point": "{0.place}: {0.payload}, {1}",
    "left out": "{0.payload}: {0.reason}",
    "tried": "{payload}: {capture} -> {lowering}: {outcome}",
    "candidate": "{0.recipe} ({0.capture} -> {0.lowering}, {1}): {2}",
    "not built": "{}: {}",
    "constants": "{0.num_constants} parameters and buffers, {1}: {2}",
    "size": "{} of parameters and buffers -> {}",
    "instructions": "{1} (of {0.instructions_of})",
    "source": "{}, weights {:.19}…",
}
"""Texts of rows by name."""

_STRIDES = {
    None: "not compared with eager's",
    True: "of all outputs equal to eager's",
    False: "of an output differ from eager's",
}

_TRADEOFFS = {
    "p50_ms": "p50 {:.3g} ms",
    "p95_ms": "p95 {:.3g} ms",
    "items_per_s": "{:.4g} items/s",
    "load_ms": "{:.3g} ms to load",
    "memory_mb": "{:.1f} MB of memory",
    "size_mb": "{:.1f} MB in size",
}
"""Texts of the figures of a Tradeoff."""


def describe(manifest: Manifest, published: Sequence[str] = ()) -> Iterator[_Row]:
    """Rows that describe an artifact.

    Args:
        manifest: manifest of the artifact.
        published: all device classes of its version, if it comes from a store.
    """
    yield from _identity(manifest, published)
    yield from _contract(manifest)
    for payload in manifest.payloads:
        yield "payload", _payload(payload)
    exact = manifest.drift.error_ratio is None
    yield ("drift", "equal to eager") if exact else _row("drift", manifest)
    if manifest.latency:
        yield from _latency(manifest.latency)
    for dropped in manifest.freezing.dropped:
        yield _row("left out", dropped)
    yield from describe_freezing(manifest.freezing, manifest.recipe.tried)
    versions = [f"{name} {value}" for name, value in manifest.toolchain.items() if value]
    yield "made with", ", ".join(versions)
    made = {"source": "unknown", "weights": "unknown", **manifest.provenance}
    yield _row("source", made["source"], made["weights"])


def _row(name: str, *values: object, **named: object) -> _Row:
    return name, _TEXTS[name].format(*values, **named)


def _identity(manifest: Manifest, published: Sequence[str]) -> Iterator[_Row]:
    if manifest.version is None:
        yield "model", f"{manifest.model}, not published"
    else:
        yield _row("model", manifest)
    classes = f" (published: {', '.join(published)})" if published else ""
    yield "device class", manifest.device_class + classes
    yield "verdict", manifest.verdict
    if manifest.gate.objective != "p50":
        yield "objective", manifest.gate.objective
    yield _row("recipe", manifest.recipe)


def _contract(manifest: Manifest) -> Iterator[_Row]:
    spec = manifest.inputs
    for tensor in spec.tensors:
        yield _row("input", tensor, ", ".join(map(str, tensor.shape)))
    for constant in spec.constants.items():
        yield _row("constant", *constant)
    if spec.dims:
        yield "dims", ", ".join(map(_sizes, spec.dims))
    for output in manifest.outputs:
        yield _row("output", output)


def _payload(payload: Payload) -> str:
    threads = place_text(payload.num_threads, {}) if payload.num_threads else "any thread count"
    size = f"{payload.path}: {size_text(payload.size_bytes)}"
    return ", ".join([size, threads, *map(_sizes, payload.dims)])


def _latency(latency: LatencyRecord) -> Iterator[_Row]:
    parts = [_speed(latency.ms.get("p50"), latency.eager_ms.get("p50"), latency)]
    if latency.num_threads:
        parts.append(place_text(latency.num_threads, {}))
    yield "speed", ", ".join(parts)
    if latency.cold_start is not None:
        yield _row("cold start", latency.cold_start)
    if len(latency.points) > 1:
        for point in latency.points:
            yield _row("point", point, _outcome(point))


def _outcome(point: PointFigures) -> str:
    if point.verdict == "not measured":
        return "calls take too long to measure"
    speed = _speed(point.p50, point.eager_p50, point)
    return f"{speed}, {point.verdict}" if point.speedup and point.verdict else speed


def _speed(p50: float | None, eager: float | None, figures: LatencyRecord | PointFigures) -> str:
    parts = []
    if p50 is not None and eager is not None:
        parts = [f"p50 {p50:.3g} ms", f"eager {eager:.3g} ms"]
    if figures.speedup is not None and figures.speedup_ci is not None:
        low, high = figures.speedup_ci
        clock = CLOCKS[figures.clock]
        speedup = f"{figures.speedup:.2f}x ({low:.2f} to {high:.2f}) {clock}"
        parts.append(speedup.rstrip())
    return ", ".join(parts) or "too disturbed to measure"


def describe_freezing(
    freezing: FreezingRecord, tried: Sequence[Mapping[str, str]]
) -> Iterator[_Row]:
    """Rows about a freeze and its attempts."""
    unknown = dict.fromkeys(("payload", "capture", "lowering", "outcome"), "unknown")
    for attempt in tried:
        if not attempt.get("outcome", "").startswith(NOT_TRIED):
            yield _row("tried", **{**unknown, **attempt})
    for warning in freezing.warnings:
        yield "warning", warning
    for path, report in freezing.reports.items():
        if len(freezing.reports) > 1:
            yield "frozen", path
        yield from _report(report)
    if freezing.reports:
        yield "strides", _STRIDES[freezing.strides_equal]
    for candidate in freezing.candidates:
        passes = f"passes, {figures_text(candidate.speedup, candidate.error_ratio)}"
        outcome = candidate.problem or passes
        yield _row("candidate", candidate, size_text(candidate.size_bytes), outcome)
    if len(freezing.pareto) > 1:
        for tradeoff in freezing.pareto:
            yield "pareto", f"{tradeoff.recipe}: {_tradeoff(tradeoff)}"
    for failure in freezing.failures.items():
        yield _row("not built", *failure)


def _tradeoff(tradeoff: Tradeoff) -> str:
    texts = []
    for name, text in _TRADEOFFS.items():
        value = getattr(tradeoff, name)
        if value is not None:
            texts.append(text.format(value))
    return ", ".join(texts)


def _report(report: FreezingReport) -> Iterator[_Row]:
    """Rows of one payload's report."""
    yield "operators", _operators(report)
    if report.changes:
        yield "done", _changes(report.changes)
    if report.changes_at_load:
        yield "done at load", _changes(report.changes_at_load)
    if report.num_constants or report.folded_bytes:
        size = size_text(report.constants_bytes)
        if report.folded_bytes:
            size += f"; folding computed {size_text(report.folded_bytes)} of new constants"
        yield _row("constants", report, size, _listed(report.constants))
    yield from _remaining(report)
    if report.unused:
        yield "unused", _listed(report.unused)
    sizes = (report.size_before_bytes, report.size_after_bytes)
    yield _row("size", *map(size_text, sizes))
    if report.instructions_of:
        families = " ".join(sorted(report.instructions)) or "baseline only"
        yield _row("instructions", report, families)
    if report.phases_s:
        times = [f"{name} {time_s:.2f} s" for name, time_s in report.phases_s.items()]
        yield "time", ", ".join(times)
    if report.memory_peak_bytes is not None:
        yield "build memory", f"peak {size_text(report.memory_peak_bytes)}"
    for guard in report.guards:
        yield "guard", guard
    for note in report.notes:
        yield "note", note


def _operators(report: FreezingReport) -> str:
    """Numbers before and after: of all operators, and of each kind, most frequent first."""
    before, after = report.ops_before, report.ops_after
    numbers = {}
    for kind in sorted({*before, *after}):
        numbers[kind] = before.get(kind, 0), after.get(kind, 0)
    kinds = sorted(numbers, key=lambda kind: -max(numbers[kind]))
    total = _change(sum(before.values()), sum(after.values()))
    changes = [f"{kind} {_change(*numbers[kind])}" for kind in kinds]
    return f"{total}: {_listed(changes)}"


def _change(before: int, after: int) -> str:
    return str(before) if before == after else f"{before} -> {after}"


def _changes(changes: Iterable[Change]) -> str:
    texts = []
    for change in changes:
        note = f" ({change.note})" if change.note else ""
        texts.append(f"{change.name} {change.count}{note}")
    return "; ".join(texts)


def _remaining(report: FreezingReport) -> Iterator[_Row]:
    """Attributes, methods and tensors that the payload keeps."""
    for name in report.preserved:
        yield "stays", f"{name.kind} {name.name}: {name.why}"
    preserved = {name.name for name in report.preserved}
    for tensor in report.kept:
        if tensor.name not in preserved:
            yield "stays", f"{tensor.name}: {tensor.reason}"


def freezing_markdown(
    *, title: str, verdict: str, tried: Sequence[Mapping[str, str]], freezing: FreezingRecord
) -> str:
    """The page of one candidate, as Markdown.

    Args:
        title: model, device class and recipe.
        verdict: verdict of the candidate, in a sentence.
        tried: the attempts, in order.
        freezing: what freezing did.
    """
    lines = [f"# What freezing did: {title}", "", verdict, "", "| | |", "|---|---|"]
    for name, value in describe_freezing(freezing, tried):
        cell = " ".join(value.split()).replace("|", "\\|")
        lines.append(f"| {name} | {cell} |")
    return "\n".join([*lines, ""])


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
        artifact: artifact whose texts are verified and read.
        kind: `code` or `graph`.
        captured: whether to read that of the captured model instead of the frozen one.

    Raises:
        NotPublishedError: the artifact has no such text.
        IntegrityError: a text is damaged.
    """
    payloads = artifact.manifest.payloads
    texts = [_text(artifact, payload, kind, captured=captured) for payload in payloads]
    if len(payloads) == 1:
        return texts[0]
    parts = zip(payloads, texts, strict=True)
    return "\n".join(f"# {payload.path}\n{text}" for payload, text in parts)


def _text(artifact: Artifact, payload: Payload, kind: str, *, captured: bool) -> str:
    stem = f"evidence/{PurePosixPath(payload.path).stem}"
    of_captured = f"{stem}-captured-{kind}.txt"
    names = [of_captured] if captured else [f"{stem}-{kind}.txt"]
    if not artifact.manifest.recipe.settings.get("freeze", True):  # the captured program serves
        names.append(of_captured)
    for file in artifact.manifest.files:
        if file.path in names:
            artifact.verify((file,))
            return (artifact.folder / file.path).read_text(errors="replace")
    raise NotPublishedError(
        f"{artifact.manifest.model} for {artifact.manifest.device_class} contains no {names[0]};"
        " earlier releases and some recipes write none: freeze the model again"
    )


def _sizes(dim: Dim) -> str:
    return f"{dim.name} {dim.min}" if dim.min == dim.max else str(dim).replace(" from ", " ", 1)


def size_text(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _listed(names: Sequence[str]) -> str:
    more = ["…"] if len(names) > MAX_SHOWN else []
    return ", ".join([*names[:MAX_SHOWN], *more])
