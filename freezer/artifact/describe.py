"""Describe a manifest in words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from freezer.artifact.describe_report import describe_freezing, size_text
from freezer.artifact.folder import Artifact
from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.sections import LatencyRecord, PointFigures
from freezer.errors import NotPublishedError
from freezer.spec.inputs import Dim
from freezer.spec.items import NestedSpec, TensorSpec


def describe(manifest: Manifest, published: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Rows of names and values that describe an artifact.

    Args:
        manifest: of the artifact.
        published: all device classes of its version, if it comes from a store.
    """
    version = f"version {manifest.version}" if manifest.version is not None else "not published"
    yield "model", f"{manifest.model}, {version}"
    yield "device class", manifest.device_class + (f" (published: {', '.join(published)})" if published else "")
    yield "verdict", manifest.verdict
    yield "recipe", f"{manifest.recipe.name}: {manifest.recipe.capture} -> {manifest.recipe.lowering}"
    yield from _contract(manifest)
    for payload in manifest.payloads:
        yield "payload", _payload(payload)
    yield "drift", _drift(manifest)
    if manifest.latency:
        yield from _latency(manifest.latency)
    for item in manifest.freezing.dropped:
        yield "left out", f"{item.payload}: {item.reason}"
    yield from describe_freezing(manifest.freezing, manifest.recipe)
    yield "made with", ", ".join(f"{name} {value}" for name, value in manifest.toolchain.items() if value)
    yield "source", f"{manifest.provenance['source']}, weights {str(manifest.provenance['weights'])[:19]}…"


def _contract(manifest: Manifest) -> Iterator[tuple[str, str]]:
    spec = manifest.inputs
    for item in spec.items:
        if isinstance(item, TensorSpec):
            yield "input", f"{item.name}: {item.dtype} [{', '.join(str(size) for size in item.shape)}]"
        elif isinstance(item, NestedSpec):
            yield "input", f"{item.name}: a {item.kind} of {', '.join(part.name for part in item.items) or 'nothing'}"
    for name, value in spec.constants.items():
        yield "constant", f"{name} = {value!r}"
    if spec.dims:
        yield "dims", ", ".join(_sizes(dim) for dim in spec.dims)
    for output in manifest.outputs:
        yield "output", f"{output.name}: {output.dtype}, rank {output.rank}"


def _sizes(dim: Dim) -> str:
    return f"{dim.name} {dim.min}" if dim.min == dim.max else str(dim).replace(" from ", " ", 1)


def _payload(payload: Payload) -> str:
    sizes = [_sizes(dim) for dim in payload.dims]
    threads = f"{payload.num_threads} threads" if payload.num_threads else "any thread count"
    return ", ".join([f"{payload.path}: {size_text(payload.size_bytes)}", threads, *sizes])


def _drift(manifest: Manifest) -> str:
    ratio, sqnr = manifest.drift.error_ratio, manifest.drift.sqnr_db
    if ratio is None:
        return "no floating-point output; equal to eager"
    distance = f", {sqnr:.0f} dB" if sqnr is not None else ""
    return f"error ratio {ratio:.2f} against {manifest.reference}{distance}"


def _latency(latency: LatencyRecord) -> Iterator[tuple[str, str]]:
    p50, eager, cold = latency.ms.get("p50"), latency.eager_ms.get("p50"), latency.cold_start
    if p50 is not None and eager is not None:
        yield "speed", f"p50 {p50:.3g} ms, eager {eager:.3g} ms{_speedup(latency)}, {latency.num_threads} threads"
    if cold is not None:
        times = f"opens in {cold.open_ms:.0f} ms, first call {cold.first_call_ms:.1f} ms"
        yield "cold start", f"{times}, peak {cold.memory_peak_mb:.0f} MB"
    for item in latency.points if len(latency.points) > 1 else ():
        sizes = "".join(f", {name} {size}" for name, size in item.point.items())
        yield "point", f"{item.num_threads} threads{sizes}: {item.payload}, {_point_figures(item)}"


def _point_figures(item: PointFigures) -> str:
    if item.p50 is None or item.eager_p50 is None:
        return "too disturbed to measure"
    return f"p50 {item.p50:.3g} ms, eager {item.eager_p50:.3g} ms{_speedup(item)}"


def _speedup(figures: LatencyRecord | PointFigures) -> str:
    if figures.speedup is None or figures.speedup_ci is None:
        return ""
    low, high = figures.speedup_ci
    return f", {figures.speedup:.2f}x ({low:.2f} to {high:.2f})"


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
    stem = PurePosixPath(payload.path).stem
    names = [f"evidence/{stem}-captured-{kind}.txt"]
    if not captured:
        names.insert(0, f"evidence/{stem}-{kind}.txt")
        if artifact.manifest.recipe.settings.get("freeze", True):
            names.pop()  # the captured program is served only if nothing was frozen
    held = {item.path: item for item in artifact.manifest.files}
    for name in names:
        if name in held:
            artifact.verify((held[name],))
            return (artifact.folder / name).read_text()
    what = "captured" if captured else "frozen"
    raise NotPublishedError(
        f"{artifact.manifest.model} for {artifact.manifest.device_class} contains no {kind} of the {what} model for {payload.path} "
        f"({names[0]}); earlier releases and some recipes write none: freeze the model again"
    )
