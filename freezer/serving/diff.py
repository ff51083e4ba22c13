"""Compare the classes of one version by the golden outputs that each artifact recorded when it was
judged. Runs no model.

The bound between two classes is the sum of their bounds to the reference; integers and bools must
be equal. Only JSON and golden tensors are read, after their digests are verified.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from rich.table import Table
from torch import Tensor

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS, FileRef, Manifest
from freezer.compare.gate import POOL_BELOW, GoldenGate, OutputError, finite, golden_bound
from freezer.compare.numerics import comparable, exact_problem, pooled, rms_errors
from freezer.errors import IntegrityError
from freezer.runtime.tensor_files import (
    OWN_OUTPUT_BYTES,
    golden_inputs,
    golden_outputs,
    load_tensors,
    own_outputs,
)
from freezer.runtime.tensors import bytes_of
from freezer.store import Store, Version

REFERENCE = "reference"
"""Name of the golden outputs in place of a class."""

NOT_KEPT = "published before outputs were recorded; freeze the model again to compare it"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenInputs:
    """One set of golden inputs: its sizes, and the classes that have it."""

    point: Mapping[str, int]
    classes: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.point.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """One output of one set of golden inputs, by two classes or by a class and the reference.
    Infinite figures are None.

    Attributes:
        set_index: index in `Difference.sets`.
        num_differing: unequal elements of an integer or bool output.
        error_ratio: rmse between the two, over the larger of the eager model's own errors; pooled
            where the gate pools.
        bound: sum of the rmse that the gate allows each to differ from the reference.
        problem: why they are apart; None where they are not.
    """

    output: str
    set_index: int
    num_elements: int
    num_differing: int = 0
    error_ratio: float | None = None
    max_abs_err: float | None = None
    rmse: float | None = None
    bound: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two classes, or a class and the reference.

    Attributes:
        apart: whether any output exceeds its bound.
        error_ratio: the largest of all outputs and sets; None without floating-point outputs.
        num_differing: unequal elements of integer and bool outputs, in all sets.
        num_compared: outputs that both have for the same inputs.
        worst: the output that is furthest apart; None without any.
    """

    one: str
    other: str
    apart: bool
    error_ratio: float | None
    num_differing: int
    num_compared: int
    worst: DiffRow | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Result for one version.

    Attributes:
        apart: whether any two classes are apart. The gate judged the distance from the reference;
            it is only shown.
        classes: classes with recorded outputs, sorted.
        sets: golden inputs of any of these classes.
        pairs: every two classes.
        reference: every class with the golden outputs.
        not_compared: reasons for the other classes of the version.
        notes: outputs that were not recorded.
    """

    model: str
    version: int
    apart: bool
    classes: tuple[str, ...]
    sets: tuple[GoldenInputs, ...]
    pairs: tuple[Pair, ...]
    reference: tuple[Pair, ...]
    not_compared: Mapping[str, str]
    notes: tuple[str, ...]

    def where(self, row: DiffRow) -> str:
        """An output and its golden inputs, as text."""
        sizes = str(self.sets[row.set_index])
        return f"output {row.output!r}, golden set {row.set_index}" + (
            f" ({sizes})" if sizes else ""
        )


def diff(reference: str, *, store: str | None = None) -> Difference:
    """Compare the classes of a version.

    Args:
        reference: `MODEL` or `MODEL:VERSION`.
        store: URI of the store; `./store` by default.

    Raises:
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
        IntegrityError: a file differs from the published one.
    """
    opened = Store.open(store or "store")
    version = opened.version(reference)
    manifests = {name: opened.manifest(version, name) for name in sorted(version.images)}
    sides = [
        _side(opened, version, manifest)
        for manifest in manifests.values()
        if _file(manifest, OWN_OUTPUTS)
    ]
    classes = tuple(side.name for side in sides)
    having = {
        key: [side for side in sides if key in side.sets] for side in sides for key in side.sets
    }
    keys = list(having)
    pairs = tuple(_pair(one, other, keys) for one, other in combinations(sides, 2))
    return Difference(
        model=version.model,
        version=version.number,
        apart=any(pair.apart for pair in pairs),
        classes=classes,
        sets=tuple(
            GoldenInputs(
                point=found[0].manifest.golden[found[0].sets[key]].point,
                classes=tuple(side.name for side in found),
            )
            for key, found in having.items()
        ),
        pairs=pairs,
        reference=tuple(_pair(side, None, keys) for side in sides),
        not_compared={name: NOT_KEPT for name in manifests if name not in classes},
        notes=tuple(note for side in sides for note in _missing(side)),
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A class and its outputs.

    Attributes:
        sets: indices of its golden sets, by the digest of their inputs.
        golden, own: outputs of the reference and of the class, by set and name.
    """

    manifest: Manifest
    sets: Mapping[str, int]
    golden: list[dict[str, Tensor]]
    own: list[dict[str, Tensor]]

    @property
    def name(self) -> str:
        return self.manifest.device_class

    def reference(self, key: str, output: str) -> Tensor:
        return self.golden[self.sets[key]][output]

    def answer(self, key: str, output: str) -> Tensor | None:
        return self.own[self.sets[key]].get(output) if key in self.sets else None

    def ratio_and_bound(self, error: OutputError, key: str, output: str) -> tuple[float, float]:
        """Error ratio against a golden output, and the rmse that the gate allows."""
        native = self.manifest.golden[self.sets[key]].native_rmse.get(output) or 0.0
        gate = GoldenGate(
            error_ratio_max=self.manifest.gate.error_ratio_max, reference=self.manifest.reference
        )
        return golden_bound(replace(error, native_rmse=native), gate)


def _side(store: Store, version: Version, manifest: Manifest) -> _Side:
    def file(path: str) -> Path:
        item = _file(manifest, path)
        if item is None:
            raise IntegrityError(
                f"{version.model}:{version.number} for {manifest.device_class}: the manifest names"
                f" no {path}"
            )
        return store.file(version, item)

    sets = {
        _digest(inputs): index
        for index, inputs in enumerate(golden_inputs(manifest, file(GOLDEN_INPUTS), load_tensors))
    }
    golden = golden_outputs(manifest, file(GOLDEN_OUTPUTS), load_tensors)
    return _Side(
        manifest=manifest, sets=sets, golden=golden, own=own_outputs(file(OWN_OUTPUTS), golden)
    )


def _file(manifest: Manifest, path: str) -> FileRef | None:
    return next((item for item in manifest.files if item.path == path), None)


def _digest(inputs: Mapping[str, Tensor]) -> str:
    """Digest of the inputs of one set."""
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor).numpy().tobytes())
    return digest.hexdigest()


def _missing(side: _Side) -> Iterator[str]:
    names = [f"{index}/{name}" for index, outputs in enumerate(side.golden) for name in outputs]
    own = {f"{index}/{name}" for index, outputs in enumerate(side.own) for name in outputs}
    missing = [name for name in names if name not in own]
    if missing:
        limit = f"the {OWN_OUTPUT_BYTES // 1024**2} MB that an artifact records"
        yield (
            f"{side.name}: {len(missing)} of {len(names)} outputs are missing, as they exceed"
            f" {limit}: {', '.join(missing)}"
        )


def _pair(one: _Side, other: _Side | None, keys: Sequence[str]) -> Pair:
    """Compare a class with another, or with the reference."""
    rows = [row for output in one.manifest.outputs for row in _rows(one, other, output.name, keys)]
    return Pair(
        one=one.name,
        other=other.name if other else REFERENCE,
        apart=any(row.problem for row in rows),
        error_ratio=max(
            (row.error_ratio for row in rows if row.error_ratio is not None), default=None
        ),
        num_differing=sum(row.num_differing for row in rows),
        num_compared=len(rows),
        worst=max(rows, key=_severity, default=None),
    )


def _severity(row: DiffRow) -> tuple[bool, bool, float]:
    """Sort key: rows that are apart, of these first the ones without a figure; then by the error
    ratio.
    """
    return (
        row.problem is not None,
        row.problem is not None and row.error_ratio is None,
        row.error_ratio or 0.0,
    )


def _rows(one: _Side, other: _Side | None, output: str, keys: Sequence[str]) -> list[DiffRow]:
    """One row for each set in which both have the output; small outputs, and those of models that
    draw, are pooled.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for key in one.sets:
        a = one.answer(key, output)
        b = one.reference(key, output) if other is None else other.answer(key, output)
        if a is not None and b is not None:
            found[key] = (a, b)
    if not found:
        return []
    sides = [one] if other is None else [one, other]
    draws = any(not side.manifest.drift.deterministic for side in sides)
    references = [one.reference(key, output) for key in found]
    limits = one.manifest.golden[0].scales.get(output, ())
    whole = (0.0, 0.0)
    if draws or any(a.numel() < POOL_BELOW for a, _ in found.values()):
        whole_rmse, _ = pooled(
            [b for _, b in found.values()], [a for a, _ in found.values()], limits
        )
        whole = whole_rmse, pooled(references, references, limits)[1]
    rows = []
    for key, r in zip(found, references, strict=True):
        a, b = found[key]
        row = DiffRow(output=output, set_index=keys.index(key), num_elements=a.numel())
        drawn = any(
            item.native_rmse.get(output) for item in one.manifest.golden
        )  # concerns integers and bools alone
        problem = exact_problem(b, a, limits, drawn=drawn)
        if problem or not comparable(a):
            num_differing = (
                int((a != b).sum()) if not drawn and not comparable(a) and a.shape == b.shape else 0
            )
            rows.append(replace(row, num_differing=num_differing, problem=problem))
            continue
        rmse, _, worst = rms_errors(b, a, limits)
        rms = rms_errors(r, r, limits)[1]
        if draws or a.numel() < POOL_BELOW:
            rmse, rms = whole
        error = OutputError(
            rmse=rmse, native_rmse=0.0, rms=rms, dtype=r.dtype, num_elements=r.numel()
        )
        ratios, bounds = zip(
            *(side.ratio_and_bound(error, key, output) for side in sides), strict=True
        )
        ratio, bound = min(ratios), math.fsum(bounds)
        rows.append(
            replace(
                row,
                error_ratio=finite(ratio),
                max_abs_err=finite(worst),
                rmse=finite(rmse),
                bound=finite(bound),
                problem=None if rmse <= bound else f"rmse {rmse:.3g} > {bound:.3g}",
            )
        )
    return rows


# Rendering


def matrix(found: Difference) -> Table:
    """The largest error ratio of every two classes, and of every class and the reference.

    Columns are numbered like rows.
    """
    table = Table("", "error ratio", box=None, pad_edge=False)
    for column in (*range(1, len(found.classes) + 1), REFERENCE):
        table.add_column(str(column), justify="right")
    pairs = {frozenset((pair.one, pair.other)): pair for pair in (*found.pairs, *found.reference)}
    for number, name in enumerate(found.classes, start=1):
        others = [
            "-" if name == other else _cell(pairs[frozenset((name, other))])
            for other in (*found.classes, REFERENCE)
        ]
        table.add_row(str(number), name, *others)
    return table


def _cell(pair: Pair) -> str:
    if not pair.num_compared:
        return "not compared"
    if pair.num_differing:
        return f"{pair.num_differing} differ"
    if pair.error_ratio is None:
        return "apart" if pair.apart else "equal"
    return f"{pair.error_ratio:.2f}" + (" apart" if pair.apart else "")


def sentences(found: Difference) -> Iterator[str]:
    """What is missing in the matrix, and the pair that is furthest apart."""
    for name, why in found.not_compared.items():
        yield f"{name}: {why}"
    yield from found.notes
    for index, item in enumerate(found.sets):
        if len(item.classes) < len(found.classes):
            sizes = f" ({item})" if str(item) else ""
            yield (
                f"golden set {index}{sizes} is only in {', '.join(item.classes)}: the others were"
                " judged with other inputs"
            )
    worst = [(pair, row) for pair in found.pairs if (row := pair.worst)]
    if worst:
        pair, row = max(worst, key=lambda item: _severity(item[1]))
        yield f"furthest apart: {pair.one} and {pair.other}: {found.where(row)}: {_figures(row)}"


def _figures(row: DiffRow) -> str:
    if row.error_ratio is None:
        return row.problem or f"all {row.num_elements} elements are equal"
    return (
        f"error ratio {row.error_ratio:.2f}, max abs err {row.max_abs_err:.3g}, rmse"
        f" {row.rmse:.3g}, allowed {row.bound:.3g}"
    )


def problem(found: Difference) -> str:
    """Error message for a version whose classes are apart; lists every pair."""
    pairs = [
        f"{pair.one} and {pair.other}: {found.where(row)}: {row.problem}"
        for pair in found.pairs
        if pair.apart and (row := pair.worst)
    ]
    return (
        f"{found.model}:{found.version} answers differently on different device classes:"
        f" {'; '.join(pairs)}. This exceeds the sum of both bounds: compare their recipes with"
        " `coldpress inspect --device-class`, and freeze the class again that is further from the"
        " reference"
    )
