"""Compare the classes of one version by the golden outputs that each artifact recorded when it was judged. Runs no model.

The bound between two classes is the sum of their bounds to the reference; integers and bools must be equal. Only
JSON and golden tensors are read, after their digests are verified.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS
from freezer.artifact.manifest import FileRef, Manifest
from freezer.errors import IntegrityError
from freezer.numerics import POOL_BELOW, GoldenGate, OutputError, comparable, exact_problem, golden_bound, pooled, rms_errors
from freezer.runtime.tensors import OWN_OUTPUT_BYTES, bytes_of, load_tensors
from freezer.serving.diff_result import REFERENCE, Difference, DiffRow, GoldenInputs, Pair
from freezer.store.store import Store, Version

NOT_KEPT = "published before outputs were recorded; freeze the model again to compare it"


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
    compared = {name: manifest for name, manifest in manifests.items() if _file(manifest, OWN_OUTPUTS) is not None}
    one_file = len({item.digest for manifest in compared.values() if (item := _file(manifest, GOLDEN_INPUTS))}) == 1
    sides = [_side(opened, version, manifest, same_sets=one_file) for manifest in compared.values()]
    keys = list(dict.fromkeys(key for side in sides for key in side.sets))
    return Difference(
        model=version.model,
        version=version.number,
        classes=tuple(compared),
        sets=tuple(_golden_inputs(key, sides) for key in keys),
        pairs=tuple(_pair(one, other, keys) for one, other in combinations(sides, 2)),
        to_reference=tuple(_pair(side, None, keys) for side in sides),
        not_compared={name: NOT_KEPT for name in manifests if name not in compared},
        notes=tuple(note for side in sides for note in _notes(side)),
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A class and its outputs.

    Attributes:
        sets: indices of its golden sets, by a key that is equal for equal inputs.
        golden, own: outputs of the reference and of the class, `<set>/<output>`.
    """

    manifest: Manifest
    sets: Mapping[str, int]
    golden: Mapping[str, Tensor]
    own: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        return self.manifest.device_class

    @property
    def gate(self) -> GoldenGate:
        return GoldenGate(error_ratio_max=self.manifest.gate.error_ratio_max, reference=self.manifest.reference)

    @property
    def draws(self) -> bool:
        return not self.manifest.drift.deterministic

    def native_rmse(self, key: str, output: str) -> float:
        return self.manifest.golden[self.sets[key]].native_rmse.get(output) or 0.0

    def reference(self, key: str, output: str) -> Tensor:
        return self.golden[f"{self.sets[key]}/{output}"]

    def answer(self, key: str, output: str) -> Tensor | None:
        return self.own.get(f"{self.sets[key]}/{output}") if key in self.sets else None


def _side(store: Store, version: Version, manifest: Manifest, *, same_sets: bool) -> _Side:
    def read(path: str) -> dict[str, Tensor]:
        item = _file(manifest, path)
        if item is None:
            raise IntegrityError(f"{version.model}:{version.number} for {manifest.device_class}: the manifest names no {path}")
        return load_tensors(store.file(version, item))

    inputs = {} if same_sets else read(GOLDEN_INPUTS)
    sets = {str(index) if same_sets else _digest(inputs, index): index for index in range(len(manifest.golden))}
    return _Side(manifest=manifest, sets=sets, golden=read(GOLDEN_OUTPUTS), own=read(OWN_OUTPUTS))


def _file(manifest: Manifest, path: str) -> FileRef | None:
    return next((item for item in manifest.files if item.path == path), None)


def _digest(tensors: Mapping[str, Tensor], index: int) -> str:
    """Digest of the inputs of one set."""
    digest, prefix = hashlib.sha256(), f"{index}/"
    for name in sorted(name for name in tensors if name.startswith(prefix)):
        tensor = tensors[name]
        digest.update(f"{name.removeprefix(prefix)}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def _golden_inputs(key: str, sides: Sequence[_Side]) -> GoldenInputs:
    having = [side for side in sides if key in side.sets]
    return GoldenInputs(point=having[0].manifest.golden[having[0].sets[key]].point, classes=tuple(side.name for side in having))


def _notes(side: _Side) -> list[str]:
    """Limits of the comparison with one class."""
    found, manifest = [], side.manifest
    if manifest.reference == "eager":
        found.append(f"{side.name}: the reference is eager, since float64 cannot run: the bounds are relative, and wider")
    if side.draws:
        found.append(f"{side.name}: the model draws random numbers: differences are compared with that noise")
    names = [f"{index}/{output.name}" for index in range(len(manifest.golden)) for output in manifest.outputs]
    missing = [name for name in names if name not in side.own]
    if missing:
        few = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        limit = f"the {OWN_OUTPUT_BYTES // 1024**2} MB that an artifact records"
        found.append(f"{side.name}: {len(missing)} of {len(names)} outputs are missing, as they exceed {limit}: {few}")
    return found


def _pair(one: _Side, other: _Side | None, keys: Sequence[str]) -> Pair:
    """Compare a class with another, or with the reference."""
    rows = [row for output in one.manifest.outputs for row in _rows(one, other, output.name, keys)]
    return Pair(one=one.name, other=other.name if other else REFERENCE, rows=tuple(rows))


def _rows(one: _Side, other: _Side | None, output: str, keys: Sequence[str]) -> list[DiffRow]:
    """One row for each set in which both have the output; small outputs, and those of models that draw, are pooled."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for key in one.sets:
        a = one.answer(key, output)
        b = one.reference(key, output) if other is None else other.answer(key, output)
        if a is not None and b is not None:
            found[key] = (a, b)
    if not found:
        return []
    sides = [one] if other is None else [one, other]
    references = [one.reference(key, output) for key in found]
    whole = pooled([b for _, b in found.values()], [a for a, _ in found.values()])[0], pooled(references, references)[1]
    rows = []
    for key, r in zip(found, references, strict=True):
        a, b = found[key]
        row = DiffRow(output=output, set_index=keys.index(key), num_elements=a.numel())
        problem = exact_problem(b, a)
        if problem or not comparable(a):
            num_differing = int((a != b).sum()) if not comparable(a) and a.shape == b.shape else 0
            rows.append(replace(row, num_differing=num_differing, problem=problem))
            continue
        rmse, _, worst = rms_errors(b, a)
        rms = rms_errors(r, r)[1]
        if any(side.draws for side in sides) or a.numel() < POOL_BELOW:
            rmse, rms = whole
        error = OutputError(rmse=rmse, native_rmse=0.0, rms=rms, dtype=r.dtype, num_elements=r.numel())
        rows.append(replace(_bounded(row, error, key, sides), max_abs_err=worst))
    return rows


def _bounded(row: DiffRow, error: OutputError, key: str, sides: Sequence[_Side]) -> DiffRow:
    """Add the ratio to the larger of the native errors, and the sum of the bounds."""
    native = [replace(error, native_rmse=side.native_rmse(key, row.output)) for side in sides]
    bound = math.fsum(golden_bound(one, side.gate)[1] for one, side in zip(native, sides, strict=True))
    ratio, _ = golden_bound(max(native, key=lambda one: one.native_rmse), sides[0].gate)
    problem = None if error.rmse <= bound else f"rmse {error.rmse:.3g} > {bound:.3g}"
    return replace(row, error_ratio=ratio, rmse=error.rmse, bound=bound, problem=problem)
