"""Describe artifacts for people: rows of `coldpress inspect`, the page freezing.md, code and
graphs. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from freezer.artifact.folder import Artifact
from freezer.artifact.latency import LatencyRecord, PointFigures, place_text
from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.sections import (
    NOT_TRIED,
    CandidateRecord,
    Change,
    FreezingRecord,
    FreezingReport,
)
from freezer.errors import NotPublishedError
from freezer.spec import CLOCKS, MARKS, Clock, Dim

FREEZING = "freezing.md"
"""File name of the page."""

MAX_SHOWN = 12
"""Most names or kinds of operators in a row."""

_Row = tuple[str, str]
"""Name and value of one row."""


_STRIDES = {
    None: "not compared with eager's",
    True: "of all outputs equal to eager's",
    False: "of an output differ from eager's",
}


def describe(
    manifest: Manifest,
    published: Sequence[str] = (),
) -> Iterator[_Row]:
    """Rows that describe an artifact.

    Args:
        manifest: manifest of the artifact.
        published: all device classes of its version, if it comes from a store.
    """
    yield from _identity(manifest, published)
    yield from _contract(manifest)
    for payload in manifest.payloads:
        yield "payload", _payload(payload)
    drift = manifest.drift
    if drift.error_ratio is None:
        yield "drift", "equal to eager"
    else:
        yield "drift", f"error ratio {drift.error_ratio:.2f} against {manifest.reference}"
    if manifest.latency:
        yield from _latency(manifest.latency)
    for dropped in manifest.freezing.dropped:
        yield "left out", f"{dropped.payload}: {dropped.reason}"
    yield from describe_freezing(manifest.freezing, manifest.recipe.tried)
    versions = [f"{name} {value}" for name, value in manifest.toolchain.items() if value]
    yield "made with", ", ".join(versions)
    source = manifest.provenance.get("source", "unknown")
    weights = manifest.provenance.get("weights", "unknown")
    yield "source", f"{source}, weights {weights!s:.19}…"


def _identity(
    manifest: Manifest,
    published: Sequence[str],
) -> Iterator[_Row]:
    version = "not published" if manifest.version is None else f"version {manifest.version}"
    yield "model", f"{manifest.model}, {version}"
    classes = f" (published: {', '.join(published)})" if published else ""
    yield "device class", manifest.device_class + classes
    yield "verdict", manifest.verdict
    if manifest.gate.objective != "p50":
        yield "objective", manifest.gate.objective
    recipe = manifest.recipe
    yield "recipe", f"{recipe.name}: {recipe.capture} -> {recipe.lowering}"


def _contract(manifest: Manifest) -> Iterator[_Row]:
    spec = manifest.inputs
    for tensor in spec.tensors:
        shape = ", ".join(map(str, tensor.shape))
        yield "input", f"{tensor.name}: {tensor.dtype} [{shape}]"
    for name, value in spec.constants.items():
        yield "constant", f"{name} = {value!r}"
    if spec.dims:
        yield "dims", ", ".join(map(_sizes, spec.dims))
    for output in manifest.outputs:
        yield "output", f"{output.name}: {output.dtype}, rank {output.rank}"


def _payload(payload: Payload) -> str:
    threads = "any thread count"
    if payload.num_threads:
        threads = place_text(payload.num_threads, {})
    parts = [f"{payload.path}: {size_text(payload.size_bytes)}", threads]
    parts.extend(map(_sizes, payload.dims))
    return ", ".join(parts)


def _latency(latency: LatencyRecord) -> Iterator[_Row]:
    speed = _speed(latency.ms.get("p50"), latency.eager_ms.get("p50"), latency)
    if latency.num_threads:
        speed += f", {place_text(latency.num_threads, {})}"
    yield "speed", speed
    cold = latency.cold_start
    if cold is not None:
        yield (
            "cold start",
            f"opens in {cold.open_ms:.0f} ms, first call {cold.first_call_ms:.1f} ms,"
            f" peak {cold.memory_peak_mb:.0f} MB",
        )
    if len(latency.points) > 1:
        for point in latency.points:
            yield "point", f"{point.place}: {point.payload}, {_outcome(point)}"


def _outcome(point: PointFigures) -> str:
    if point.verdict == "not measured":
        return "calls take too long to measure"
    speed = _speed(point.p50, point.eager_p50, point)
    return f"{speed}, {point.verdict}" if point.speedup and point.verdict else speed


def _speed(
    p50: float | None,
    eager: float | None,
    figures: LatencyRecord | PointFigures,
) -> str:
    parts = []
    if p50 is not None and eager is not None:
        parts.append(f"p50 {p50:.3g} ms")
        parts.append(f"eager {eager:.3g} ms")
    if figures.speedup is not None and figures.speedup_ci is not None:
        low, high = figures.speedup_ci
        clock = CLOCKS[figures.clock]
        mark = MARKS[figures.clock]
        speedup = f"{mark}{figures.speedup:.2f}x ({low:.2f} to {high:.2f}) {clock}"
        parts.append(speedup.rstrip())
    return ", ".join(parts) or "too disturbed to measure"


def describe_freezing(
    freezing: FreezingRecord,
    tried: Sequence[Mapping[str, str]],
) -> Iterator[_Row]:
    """Rows about a freeze and its attempts."""
    for attempt in tried:
        outcome = attempt.get("outcome", "unknown")
        if not outcome.startswith(NOT_TRIED):
            known = [attempt.get(name, "unknown") for name in ("payload", "capture", "lowering")]
            payload, capture, lowering = known
            yield "tried", f"{payload}: {capture} -> {lowering}: {outcome}"
    for warning in freezing.warnings:
        yield "warning", warning
    for path, report in freezing.reports.items():
        if len(freezing.reports) > 1:
            yield "frozen", path
        yield from _report(report)
    if freezing.reports:
        yield "strides", _STRIDES[freezing.strides_equal]
    for candidate in freezing.candidates:
        yield "candidate", _candidate(candidate)
    for recipe, failure in freezing.failures.items():
        yield "not built", f"{recipe}: {failure}"


def _candidate(candidate: CandidateRecord) -> str:
    outcome = candidate.problem
    if not outcome:
        outcome = f"passes, {figures_text(candidate.speedup, candidate.error_ratio)}"
    size = size_text(candidate.size_bytes)
    return f"{candidate.recipe} ({candidate.capture} -> {candidate.lowering}, {size}): {outcome}"


def _report(report: FreezingReport) -> Iterator[_Row]:
    """Rows of one payload's report."""
    yield "operators", _operators(report)
    if report.changes:
        yield "done", _changes(report.changes)
    if report.num_constants or report.folded_bytes:
        size = size_text(report.constants_bytes)
        if report.folded_bytes:
            size += f"; folding computed {size_text(report.folded_bytes)} of new constants"
        names = _listed(report.constants)
        yield "constants", f"{report.num_constants} parameters and buffers, {size}: {names}"
    yield from _remaining(report)
    if report.unused:
        yield "unused", _listed(report.unused)
    before, after = size_text(report.size_before_bytes), size_text(report.size_after_bytes)
    yield "size", f"{before} of parameters and buffers -> {after}"
    if report.instructions_of:
        families = " ".join(sorted(report.instructions)) or "baseline only"
        yield "instructions", f"{families} (of {report.instructions_of})"
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
    before, after = Counter(report.ops_before), Counter(report.ops_after)
    most_frequent = before | after
    changes = []
    for kind in sorted(most_frequent, key=lambda kind: (-most_frequent[kind], kind)):
        change = _change(before[kind], after[kind])
        changes.append(f"{kind} {change}")
    total = _change(before.total(), after.total())
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
    *,
    title: str,
    verdict: str,
    tried: Sequence[Mapping[str, str]],
    freezing: FreezingRecord,
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
        words = value.replace("|", "\\|").split()
        lines.append(f"| {name} | {' '.join(words)} |")
    lines.append("")
    return "\n".join(lines)


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


def figures_text(
    speedup: float | None,
    error_ratio: float | None,
    clock: Clock = "wall",
) -> str:
    """Figures of a candidate that passes the gate."""
    speed = "not timed" if speedup is None else f"speedup {MARKS[clock]}{speedup:.2f} over eager"
    return speed if error_ratio is None else f"{speed}, error ratio {error_ratio:.2f}"


def frozen_code(artifact: Artifact) -> str:
    """The code of every payload, under its path if there are several.

    Raises:
        NotPublishedError: the artifact has no such text.
        IntegrityError: a text is damaged.
    """
    payloads = artifact.manifest.payloads
    texts = []
    for payload in payloads:
        text = _code(artifact, payload)
        texts.append(text if len(payloads) == 1 else f"# {payload.path}\n{text}")
    return "\n".join(texts)


def _code(artifact: Artifact, payload: Payload) -> str:
    manifest = artifact.manifest
    stem = f"evidence/{PurePosixPath(payload.path).stem}"
    names = [f"{stem}-code.txt"]
    if payload.kind == "exported" or not manifest.recipe.settings.get("freeze", True):
        names.append(f"{stem}-captured-code.txt")  # the captured program serves
    for file in manifest.files:
        if file.path in names:
            artifact.verify((file,))
            path = artifact.folder / file.path
            return path.read_text(errors="replace")
    raise NotPublishedError(
        f"{manifest.model} for {manifest.device_class} contains no {names[0]};"
        " earlier releases and some recipes write none: freeze the model again"
    )


def _sizes(dim: Dim) -> str:
    if dim.min == dim.max:
        return f"{dim.name} {dim.min}"
    return str(dim).replace(" from ", " ", 1)


def size_text(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:MAX_SHOWN])
    if len(names) > MAX_SHOWN:
        shown.append("…")
    return ", ".join(shown)
