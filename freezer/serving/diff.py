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

from torch import Tensor

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS, FileRef, Manifest
from freezer.compare import (
    POOL_BELOW,
    Comparison,
    OutputError,
    Values,
    compare,
    finite,
    golden_bound,
    pooled,
)
from freezer.compare.tensor_values import values_of
from freezer.errors import IntegrityError
from freezer.runtime.tensor_files import (
    OWN_OUTPUT_BYTES,
    golden_inputs,
    golden_outputs,
    load_tensors,
    own_outputs,
)
from freezer.runtime.tensors import bytes_of
from freezer.serving.canary import gate_of, is_drawn
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
    sides = []
    not_compared = {}
    for name in sorted(version.images):
        manifest = opened.manifest(version, name)
        if _file(manifest, OWN_OUTPUTS):
            sides.append(_side(opened, version, manifest))
        else:
            not_compared[name] = NOT_KEPT
    sets = _golden_sets(sides)
    keys = list(sets)
    pairs = tuple(_pair(one, other, keys) for one, other in combinations(sides, 2))
    return Difference(
        model=version.model,
        version=version.number,
        apart=any(pair.apart for pair in pairs),
        classes=tuple(side.name for side in sides),
        sets=tuple(sets.values()),
        pairs=pairs,
        reference=tuple(_pair(side, None, keys) for side in sides),
        not_compared=not_compared,
        notes=tuple(note for side in sides for note in _missing(side)),
    )


_Outputs = Sequence[Mapping[str, Values]]
"""Values by name of the output, of every golden set."""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A class and its outputs.

    Attributes:
        sets: indices of its golden sets, by the digest of their inputs.
        golden, own: outputs of the reference and of the class.
    """

    manifest: Manifest
    sets: Mapping[str, int]
    golden: _Outputs
    own: _Outputs

    @property
    def name(self) -> str:
        return self.manifest.device_class

    def reference(self, key: str, output: str) -> Values:
        return self.golden[self.sets[key]][output]

    def answer(self, key: str, output: str) -> Values | None:
        return self.own[self.sets[key]].get(output) if key in self.sets else None

    def ratio_and_bound(self, error: OutputError, key: str, output: str) -> tuple[float, float]:
        """Error ratio against a golden output, and the rmse that the gate allows."""
        native = self.manifest.golden[self.sets[key]].native_rmse.get(output) or 0.0
        return golden_bound(replace(error, native_rmse=native), gate_of(self.manifest))


def _side(store: Store, version: Version, manifest: Manifest) -> _Side:
    def file(path: str) -> Path:
        ref = _file(manifest, path)
        if ref is None:
            raise IntegrityError(
                f"{version.model}:{version.number} for {manifest.device_class}: the manifest names"
                f" no {path}"
            )
        return store.file(version, ref)

    inputs = golden_inputs(manifest, file(GOLDEN_INPUTS), load_tensors)
    golden = golden_outputs(manifest, file(GOLDEN_OUTPUTS), load_tensors)
    own = own_outputs(file(OWN_OUTPUTS), golden)
    return _Side(
        manifest=manifest,
        sets={_digest(tensors): index for index, tensors in enumerate(inputs)},
        golden=_values(golden),
        own=_values(own),
    )


def _values(sets: Sequence[Mapping[str, Tensor]]) -> _Outputs:
    outputs = []
    for tensors in sets:
        outputs.append({name: values_of(tensor) for name, tensor in tensors.items()})
    return outputs


def _file(manifest: Manifest, path: str) -> FileRef | None:
    return next((ref for ref in manifest.files if ref.path == path), None)


def _digest(inputs: Mapping[str, Tensor]) -> str:
    """Digest of the inputs of one set."""
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor).numpy().tobytes())
    return digest.hexdigest()


def _golden_sets(sides: Sequence[_Side]) -> dict[str, GoldenInputs]:
    """The golden inputs of all classes, by their digest."""
    sets: dict[str, GoldenInputs] = {}
    for side in sides:
        for key, index in side.sets.items():
            known = sets.get(key)
            if known is None:
                known = GoldenInputs(point=side.manifest.golden[index].point, classes=())
            sets[key] = replace(known, classes=(*known.classes, side.name))
    return sets


def _missing(side: _Side) -> Iterator[str]:
    num_outputs = 0
    missing = []
    for index, (outputs, own) in enumerate(zip(side.golden, side.own, strict=True)):
        num_outputs += len(outputs)
        missing += [f"{index}/{name}" for name in outputs if name not in own]
    if missing:
        limit = f"the {OWN_OUTPUT_BYTES // 1024**2} MB that an artifact records"
        yield (
            f"{side.name}: {len(missing)} of {num_outputs} outputs are missing, as they exceed"
            f" {limit}: {', '.join(missing)}"
        )


def _pair(one: _Side, other: _Side | None, keys: Sequence[str]) -> Pair:
    """Compare a class with another, or with the reference."""
    rows = []
    for output in one.manifest.outputs:
        rows += _rows(one, other, output.name, keys)
    ratios = [row.error_ratio for row in rows if row.error_ratio is not None]
    return Pair(
        one=one.name,
        other=other.name if other else REFERENCE,
        apart=any(row.problem for row in rows),
        error_ratio=max(ratios, default=None),
        num_differing=sum(row.num_differing for row in rows),
        num_compared=len(rows),
        worst=max(rows, key=severity, default=None),
    )


def severity(row: DiffRow | None) -> tuple[bool, bool, float]:
    """Sort key: rows that are apart, of these first the ones without a figure; then by the error
    ratio.
    """
    assert row is not None
    apart = row.problem is not None
    return apart, apart and row.error_ratio is None, row.error_ratio or 0.0


def _rows(one: _Side, other: _Side | None, output: str, keys: Sequence[str]) -> list[DiffRow]:
    """One row for each set in which both have the output; small outputs, and those of models that
    draw, are pooled.
    """
    sides = [one] if other is None else [one, other]
    limits = one.manifest.golden[0].scales.get(output, ())
    drawn = is_drawn(one.manifest, output)
    comparisons: dict[str, Comparison] = {}
    references: dict[str, Comparison] = {}
    for key in one.sets:
        c = one.answer(key, output)
        r = one.reference(key, output) if other is None else other.answer(key, output)
        if c is not None and r is not None:
            golden = one.reference(key, output)
            comparisons[key] = compare(r, c, limits, drawn=drawn)
            references[key] = compare(golden, golden, limits)
    pool = pooled(comparisons.values()), pooled(references.values())
    draws = any(not side.manifest.drift.deterministic for side in sides)
    rows = []
    for key, comparison in comparisons.items():
        golden = one.reference(key, output)
        row = DiffRow(
            output=output,
            set_index=keys.index(key),
            num_elements=golden.size,
            num_differing=comparison.num_differing,
            problem=comparison.problem,
        )
        if comparison.groups:
            sums, size = comparison.groups[0], references[key].groups[0]
            if draws or golden.size < POOL_BELOW:
                sums, size = pool
            error = replace(sums.error(golden.dtype, golden.size), rms=size.rms)
            judged = [side.ratio_and_bound(error, key, output) for side in sides]
            row = replace(_judged(row, error, judged), max_abs_err=finite(comparison.max_abs_err))
        rows.append(row)
    return rows


def _judged(row: DiffRow, error: OutputError, judged: Sequence[tuple[float, float]]) -> DiffRow:
    """Add the figures and the problem, from the ratio and the bound of each side."""
    ratio = min(ratio for ratio, _ in judged)
    bound = math.fsum(bound for _, bound in judged)
    apart = not error.rmse <= bound
    return replace(
        row,
        error_ratio=finite(ratio),
        rmse=finite(error.rmse),
        bound=finite(bound),
        problem=f"rmse {error.rmse:.3g} > {bound:.3g}" if apart else None,
    )
