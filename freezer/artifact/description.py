"""Describe artifacts for people: rows of `coldpress inspect`, the page freezing.md, code and
graphs. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from freezer.artifact.folder import Artifact
from freezer.artifact.latency import ERROR_RATIO, LatencyRecord, PointFigures, place_text
from freezer.artifact.manifest import Manifest, Payload, size_of
from freezer.artifact.sections import (
    NOT_TRIED,
    AccuracyRecord,
    CandidateRecord,
    FreezingRecord,
    FreezingReport,
)
from freezer.errors import NotPublishedError
from freezer.hardware import PORTABLE
from freezer.spec import CLOCKS, MARKS, Clock, text_of

FREEZING = "freezing.md"
"""File name of the page."""

MAX_SHOWN = 12
"""Most names or kinds of operators in a row."""

_Row = tuple[str, str]
"""Name and value of one row."""


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
    elif manifest.accuracy is not None and drift.sqnr_db is not None:
        yield "drift", f"SQNR {drift.sqnr_db:.1f} dB against {manifest.reference}"
    else:
        ratio = f"error ratio {drift.error_ratio:.2f} against {manifest.reference}"
        yield "drift", f"{ratio} ({ERROR_RATIO})"
    if manifest.latency:
        yield from _latency(manifest.latency)
    else:
        yield "speed", CLOCKS["none"]
    for dropped in manifest.freezing.dropped:
        yield "left out", f"{dropped.payload}: {dropped.reason}"
    yield from describe_freezing(
        manifest.freezing, manifest.recipe.tried, _clock(manifest), manifest.accuracy
    )
    yield "made with", _joined(manifest.toolchain)
    yield "source", str(manifest.provenance.get("source", "unknown"))


def _accuracy(record: AccuracyRecord) -> Iterator[_Row]:
    yield "precision", str(record)
    sure = f"{record.confidence:.0%} sure, one-sided, for {record.num_candidates} candidates"
    yield "budget", f"{_joined(record.budget)} ({sure})"
    measured = ", ".join(text_of(name, value) for name, value in record.measured.items())
    yield "measured", f"{measured}, on {record.samples['judged']} held-out samples"
    origin = record.digest or "generated"
    yield "samples", f"{_joined(record.samples)}, split by seed {record.seed}: {origin}"


def _identity(
    manifest: Manifest,
    published: Sequence[str],
) -> Iterator[_Row]:
    version = "not published" if manifest.version is None else f"version {manifest.version}"
    yield "model", f"{manifest.model}, {version}"
    classes = f" (published: {', '.join(published)})" if published else ""
    yield "device class", manifest.device_class + classes
    is_fallback = manifest.device_class == PORTABLE
    why = f"by {manifest.gate.objective}" if manifest.latency else "by drift alone"
    if is_fallback:
        why = "the fallback of all machines"
    yield "verdict", f"{with_accuracy(manifest.verdict, manifest.accuracy)}, {why}"
    host = manifest.provenance.get("host")
    if is_fallback and isinstance(host, Mapping) and "machine" in host:
        others = host.get("others")
        machines = [host["machine"], *(others if isinstance(others, list | tuple) else ())]
        yield "proven on", ", ".join(map(str, machines))
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
        yield "dims", ", ".join(map(str, spec.dims))
    for output in manifest.outputs:
        yield "output", f"{output.name}: {output.dtype}, rank {output.rank}"


def _payload(payload: Payload) -> str:
    threads = "any thread count"
    if payload.num_threads:
        threads = place_text(payload.num_threads, {})
    size = size_text(size_of([payload]))
    return ", ".join([f"{payload.path}: {size}", threads, *map(str, payload.dims)])


def _latency(latency: LatencyRecord) -> Iterator[_Row]:
    speed = _speed(latency.ms.get("p50"), latency.eager_ms.get("p50"), latency)
    if latency.inherited:
        speed += f", inherited from version {latency.inherited}, which has other weights"
    yield "speed", speed
    cold = latency.cold_start
    if cold is not None:
        yield "cold start", f"{cold.load_ms:.0f} ms, peak {cold.memory_peak_mb:.0f} MB"
    for point in latency.points:
        speed = _speed(point.p50, point.eager_p50, point)
        yield "point", f"{point.place}: {point.payload}, {speed}, {point.verdict}"


def _speed(
    p50: float | None,
    eager: float | None,
    figures: LatencyRecord | PointFigures,
) -> str:
    parts = []
    if p50 is not None and eager is not None:
        parts.append(f"p50 {p50:.3g} ms, eager {eager:.3g} ms")
    if figures.speedup is not None and figures.speedup_ci is not None:
        low, high = figures.speedup_ci
        speedup = f"{MARKS[figures.clock]}{figures.speedup:.2f}x ({low:.2f} to {high:.2f})"
        parts.append(f"{speedup} {CLOCKS[figures.clock]}".rstrip())
    return ", ".join(parts) or "not measured"


def with_accuracy(verdict: str, accuracy: AccuracyRecord | None) -> str:
    """A verdict with what a lower precision costs: `published (int8, agreement at least 99.2%)`."""
    is_lower = accuracy is not None and verdict == "published"
    return f"{verdict} ({accuracy})" if is_lower else verdict


def describe_freezing(
    freezing: FreezingRecord,
    tried: Sequence[Mapping[str, str]],
    clock: Clock = "wall",
    accuracy: AccuracyRecord | None = None,
) -> Iterator[_Row]:
    """Rows about a freeze and its attempts, and what a lower precision costs; `clock` measured the
    candidates that did not win.
    """
    if accuracy is not None:
        yield from _accuracy(accuracy)
    for attempt in tried:
        outcome = attempt.get("outcome", "unknown")
        if not outcome.startswith(NOT_TRIED):
            steps = " -> ".join(attempt.get(name, "unknown") for name in ("capture", "lowering"))
            yield "tried", f"{attempt.get('payload', 'unknown')}: {steps}: {outcome}"
    for warning in freezing.warnings:
        yield "warning", warning
    for path, report in freezing.reports.items():
        if len(freezing.reports) > 1:
            yield "frozen", path
        yield from _report(report)
    if freezing.strides_equal is False:
        yield "strides", "of an output differ from eager's"
    for candidate in freezing.candidates:
        yield "candidate", _candidate(candidate, clock)
    for recipe, failure in freezing.failures.items():
        yield "not built", f"{recipe}: {failure}"


def _clock(manifest: Manifest) -> Clock:
    latency = manifest.latency
    if latency is None:
        return "wall"
    return "inherited" if latency.inherited else latency.clock


def _candidate(candidate: CandidateRecord, clock: Clock) -> str:
    outcome = candidate.problem
    if not outcome:
        outcome = f"passes, {figures_text(candidate.speedup, candidate.error_ratio, clock)}"
    size = size_text(candidate.size_bytes)
    return f"{candidate.recipe} ({candidate.capture} -> {candidate.lowering}, {size}): {outcome}"


def _report(report: FreezingReport) -> Iterator[_Row]:
    """Rows of one payload's report."""
    before, after = Counter(report.ops_before), Counter(report.ops_after)
    kinds = [_change(kind, before[kind], after[kind]) for kind, _ in (before | after).most_common()]
    yield "operators", f"{before.total()} -> {after.total()}: {_listed(kinds)}"
    if report.precisions:
        counts = ", ".join(f"{num} in {name}" for name, num in report.precisions.items())
        yield "products", f"{counts} (convolutions and matrix products)"
    for kept in report.kept_exact:
        yield "kept exact", f"{kept.name}: {kept.reason}"
    if report.changes:
        changes = [f"{change.name} {change.count} {change.note}" for change in report.changes]
        yield "done", "; ".join(map(str.rstrip, changes))
    if report.num_constants:
        size = size_text(report.constants_bytes)
        names = _listed(report.constants)
        yield "constants", f"{report.num_constants} parameters and buffers, {size}: {names}"
    stays = {name.name: name.why for name in report.preserved}
    stays |= {tensor.name: tensor.reason for tensor in report.kept}
    for name, reason in stays.items():
        yield "stays", f"{name}: {reason}"
    if report.unused:
        yield "unused", _listed(report.unused)
    yield "size", f"{size_text(report.size_before_bytes)} -> {size_text(report.size_after_bytes)}"
    if report.instructions:
        families = " ".join(sorted(report.instructions))
        yield "instructions", f"{families} (of {report.instructions_of})"
    yield "time", _joined({name: f"{time_s:.2f} s" for name, time_s in report.phases_s.items()})
    for guard in report.guards:
        yield "guard", guard
    for note in report.notes:
        yield "note", note


def _change(name: str, before: int, after: int) -> str:
    return f"{name} {before}" if before == after else f"{name} {before} -> {after}"


def _joined(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def freezing_markdown(title: str, verdict: str, rows: Iterable[_Row]) -> str:
    """The page of one candidate, as Markdown.

    Args:
        title: model, device class and recipe.
        verdict: verdict of the candidate, in a sentence.
        rows: of `describe_freezing`.
    """
    lines = [f"# What freezing did: {title}", "", verdict, "", "| | |", "|---|---|"]
    for name, value in rows:
        words = value.replace("|", "\\|").split()
        lines.append(f"| {name} | {' '.join(words)} |")
    lines.append("")
    return "\n".join(lines)


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
            return (artifact.folder / file.path).read_text(errors="replace")
    raise NotPublishedError(
        f"{manifest.model} for {manifest.device_class} contains no {names[0]};"
        " earlier releases and some recipes write none: freeze the model again"
    )


def size_text(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _listed(names: Sequence[str]) -> str:
    rest = ["…"] if len(names) > MAX_SHOWN else []
    return ", ".join([*names[:MAX_SHOWN], *rest])
