"""Compare the classes of one version by the golden outputs that each artifact recorded when it was
judged. Runs no model.

The bound between two classes is the sum of their bounds to the reference; integers and bools must
be equal. Only JSON and golden tensors are read, after their digests are verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from freezer.artifact import OWN_OUTPUTS
from freezer.compare import (
    POOL_BELOW,
    Comparison,
    OutputError,
    Sums,
    Values,
    compare,
    distances,
    finite,
    golden_bound,
    pooled,
)
from freezer.serving.canary import gate_of, is_drawn
from freezer.serving.recorded_outputs import ClassOutputs, read_outputs
from freezer.store import Store

REFERENCE = "reference"
"""Name of the golden outputs in place of a class."""

NOT_KEPT = "published before outputs were recorded; freeze the model again to compare it"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenInputs:
    """One set of golden inputs: its sizes, and the classes that have it."""

    point: Mapping[str, int]
    classes: tuple[str, ...]


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
        notes: how many outputs were not recorded, by class.
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


def diff(
    reference: str,
    *,
    store: str | None = None,
) -> Difference:
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
        if any(file.path == OWN_OUTPUTS for file in manifest.files):
            side = read_outputs(opened, version, manifest)
            sides.append(side)
        else:
            not_compared[name] = NOT_KEPT
    sets = _golden_sets(sides)
    keys = list(sets)
    pairs = [_pair(one, other, keys) for one, other in combinations(sides, 2)]
    return Difference(
        model=version.model,
        version=version.number,
        apart=any(pair.apart for pair in pairs),
        classes=tuple(side.name for side in sides),
        sets=tuple(sets.values()),
        pairs=tuple(pairs),
        reference=tuple(_pair(side, None, keys) for side in sides),
        not_compared=not_compared,
        notes=tuple(side.note for side in sides if side.note),
    )


def _golden_sets(sides: Sequence[ClassOutputs]) -> dict[str, GoldenInputs]:
    """The golden inputs of all classes, by their digest."""
    sets: dict[str, GoldenInputs] = {}
    for side in sides:
        for key, answers in side.answers.items():
            classes = sets[key].classes if key in sets else ()
            sets[key] = GoldenInputs(
                point=answers.recorded.point,
                classes=(*classes, side.name),
            )
    return sets


def _pair(
    one: ClassOutputs,
    other: ClassOutputs | None,
    keys: Sequence[str],
) -> Pair:
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


def severity(row: DiffRow) -> tuple[bool, bool, float]:
    """Sort key: rows that are apart, of these first the ones without a figure; then by the error
    ratio.
    """
    apart = row.problem is not None
    return apart, apart and row.error_ratio is None, row.error_ratio or 0.0


def _rows(
    one: ClassOutputs,
    other: ClassOutputs | None,
    output: str,
    keys: Sequence[str],
) -> list[DiffRow]:
    """One row for each set in which both have the output; small outputs, and those of models that
    draw, are pooled.
    """
    sides = [one] if other is None else [one, other]
    compared = _compared(one, other, output)
    pool = pooled(comparison for comparison, _ in compared.values())
    golden_pool = Sums()
    for _, golden_sums in compared.values():
        golden_pool.include(golden_sums)
    draws = any(not side.manifest.drift.deterministic for side in sides)
    rows = []
    for key, (comparison, golden_sums) in compared.items():
        golden = one.answers[key].reference[output]
        row = DiffRow(
            output=output,
            set_index=keys.index(key),
            num_elements=golden.size,
            num_differing=comparison.num_differing,
            problem=comparison.problem,
        )
        if comparison.groups:
            sums, rms = comparison.groups[0], golden_sums.rms
            if draws or golden.size < POOL_BELOW:
                sums, rms = pool, golden_pool.rms
            error = sums.error(golden.dtype, golden.size)
            error = replace(error, rms=rms)
            bounds = [_ratio_and_bound(side, error, key, output) for side in sides]
            row = _judged(row, comparison, error, bounds)
        rows.append(row)
    return rows


def _compared(
    one: ClassOutputs,
    other: ClassOutputs | None,
    output: str,
) -> dict[str, tuple[Comparison, Sums]]:
    """For each set in which both have an output, its comparison and the sums of the golden one."""
    limits = one.manifest.golden[0].scales.get(output, ())
    drawn = is_drawn(one.manifest, output)
    compared = {}
    for key, answers in one.answers.items():
        golden = answers.reference[output]
        r: Values | None = golden
        if other is not None:
            r = other.answers[key].own.get(output) if key in other.answers else None
        c = answers.own.get(output)
        if c is not None and r is not None:
            comparison = compare(r, c, limits, drawn=drawn)
            golden_sums = distances(golden, golden, limits=limits)[0]
            compared[key] = (comparison, golden_sums)
    return compared


def _ratio_and_bound(
    side: ClassOutputs,
    error: OutputError,
    key: str,
    output: str,
) -> tuple[float, float]:
    """Error ratio against a golden output, and the rmse that the gate of a class allows."""
    recorded = side.answers[key].recorded
    native_rmse = recorded.native_rmse.get(output) or 0.0
    error = replace(error, native_rmse=native_rmse)
    return golden_bound(error, gate_of(side.manifest))


def _judged(
    row: DiffRow,
    comparison: Comparison,
    error: OutputError,
    judged: Sequence[tuple[float, float]],
) -> DiffRow:
    """Add the figures and the problem, from the ratio and the bound of each side."""
    ratios, bounds = zip(*judged, strict=True)
    bound = math.fsum(bounds)
    problem = None
    if not error.rmse <= bound:
        problem = f"rmse {error.rmse:.3g} > {bound:.3g}"
    return replace(
        row,
        error_ratio=finite(min(ratios)),
        max_abs_err=finite(comparison.max_abs_err),
        rmse=finite(error.rmse),
        bound=finite(bound),
        problem=problem,
    )
