"""Diff: how far the classes of one version are from each other and from the reference, by the outputs that each artifact keeps.

Nothing is run: an artifact holds what its payloads answered to the golden inputs on the hardware of its judge. Two classes may
differ by the sum of what the gate allows each of them to be from the reference; those that differ by more are apart. Integers and
bools must be equal. Only JSON and golden tensors are read, whose digests come first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS
from freezer.artifact.manifest import FileRef, Manifest
from freezer.errors import IntegrityError
from freezer.numerics import POOL_BELOW, GoldenGate, OutputError, comparable, exact_problem, golden_bound, pooled, rms_errors
from freezer.runtime.recorded_outputs import OWN_OUTPUT_BYTES
from freezer.runtime.tensor_bytes import bytes_of
from freezer.runtime.tensor_files import load_tensors
from freezer.serving.diff_result import REFERENCE, Difference, DiffRow, GoldenInputs, Pair
from freezer.store.store import Store, Version

NOT_KEPT = "published before outputs were kept; freeze the model anew to compare it"


def diff(reference: str, *, store: str | None = None) -> Difference:
    """How far the classes of a version are apart.

    Args:
        reference: `MODEL` or `MODEL:VERSION`.
        store: URI of the store; `./store` by default.

    Raises:
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
        IntegrityError: a file is not what was published.
    """
    opened = Store.open(store or "store")
    version = opened.version(reference)
    manifests = {name: opened.manifest(version, name) for name in sorted(version.images)}
    kept = {name: manifest for name, manifest in manifests.items() if _file(manifest, OWN_OUTPUTS) is not None}
    keys = _set_keys(opened, version, kept)
    sides = [_side(opened, version, manifest, keys[name]) for name, manifest in kept.items()]
    every = list(dict.fromkeys(key for side in sides for key in side.sets))
    return Difference(
        model=version.model,
        version=version.number,
        classes=tuple(kept),
        sets=tuple(_golden_inputs(key, sides) for key in every),
        pairs=tuple(_pair(one, other, every) for one, other in combinations(sides, 2)),
        to_reference=tuple(_pair(side, None, every) for side in sides),
        not_compared={name: NOT_KEPT for name in manifests if name not in kept},
        notes=tuple(note for side in sides for note in _notes(side)),
    )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A class and its answers.

    Attributes:
        sets: by what tells its inputs, the index of a golden set.
        golden, own: tensors `<set>/<output>`: the reference's, and what the class answered.
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

    def native_rmse(self, key: str, output: str) -> float:
        return self.manifest.golden[self.sets[key]].native_rmse.get(output) or 0.0

    def reference(self, key: str, output: str) -> Tensor:
        return self.golden[f"{self.sets[key]}/{output}"]

    def answer(self, key: str, output: str) -> Tensor | None:
        return self.own.get(f"{self.sets[key]}/{output}") if key in self.sets else None


def _side(store: Store, version: Version, manifest: Manifest, keys: Sequence[str]) -> _Side:
    golden, own = _read(store, version, manifest, GOLDEN_OUTPUTS), _read(store, version, manifest, OWN_OUTPUTS)
    return _Side(manifest=manifest, sets={key: index for index, key in enumerate(keys)}, golden=golden, own=own)


def _file(manifest: Manifest, path: str) -> FileRef | None:
    return next((item for item in manifest.files if item.path == path), None)


def _read(store: Store, version: Version, manifest: Manifest, path: str) -> dict[str, Tensor]:
    item = _file(manifest, path)
    if item is None:
        raise IntegrityError(f"{version.model}:{version.number} for {manifest.device_class}: the manifest names no {path}")
    return load_tensors(store.file(version, item))


def _set_keys(store: Store, version: Version, manifests: Mapping[str, Manifest]) -> dict[str, list[str]]:
    """By class, for each golden set what tells its inputs: its index where all classes have one file, else a digest."""
    files = {name: _file(manifest, GOLDEN_INPUTS) for name, manifest in manifests.items()}
    if len({item.digest if item else None for item in files.values()}) == 1:
        return {name: [str(index) for index in range(len(manifest.golden))] for name, manifest in manifests.items()}
    found = {}
    for name, manifest in manifests.items():
        tensors = _read(store, version, manifest, GOLDEN_INPUTS)
        found[name] = [_digest(tensors, index) for index in range(len(manifest.golden))]
    return found


def _digest(tensors: Mapping[str, Tensor], index: int) -> str:
    """A digest of the inputs of one set."""
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
    """What limits the figures of a class."""
    found, manifest = [], side.manifest
    if manifest.reference == "eager":
        found.append(f"{side.name}: its reference is eager itself, since float64 cannot run: the bounds are relative, and wider")
    if not manifest.drift.deterministic:
        found.append(f"{side.name}: the model draws by chance, so answers differ by their draws: they are held to that noise")
    names = [f"{index}/{output.name}" for index in range(len(manifest.golden)) for output in manifest.outputs]
    left_out = [name for name in names if name not in side.own]
    if left_out:
        limit = f"the {OWN_OUTPUT_BYTES // 1024**2} MB that an artifact keeps"
        found.append(f"{side.name}: {len(left_out)} of {len(names)} outputs are left out, being above {limit}: {_few(left_out)}")
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _pair(one: _Side, other: _Side | None, every: Sequence[str]) -> Pair:
    """A class against another, or against the reference."""
    rows: list[DiffRow] = []
    for output in one.manifest.outputs:
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for key in one.sets:
            a = one.answer(key, output.name)
            b = one.reference(key, output.name) if other is None else other.answer(key, output.name)
            if a is not None and b is not None:
                found[key] = (a, b)
        rows += _rows(one, other, output.name, found, every)
    return Pair(one=one.name, other=other.name if other else REFERENCE, rows=tuple(rows))


def _rows(
    one: _Side, other: _Side | None, output: str, found: Mapping[str, tuple[Tensor, Tensor]], every: Sequence[str]
) -> list[DiffRow]:
    """One row for each set in which both have the output. Small ones, and those of models that draw, are pooled over the sets."""
    if not found:
        return []
    pooled_rmse, _ = pooled([b for _, b in found.values()], [a for a, _ in found.values()])
    references = [one.reference(key, output) for key in found]
    _, pooled_rms = pooled(references, references)
    draws = any(not side.manifest.drift.deterministic for side in (one, other) if side is not None)
    rows = []
    for key, (a, b) in found.items():
        problem, exact = exact_problem(b, a), not comparable(a)
        row: dict[str, Any] = {"output": output, "set_index": every.index(key), "num_elements": a.numel()}
        if problem or exact:
            differing = int((a != b).sum()) if exact and a.shape == b.shape else 0
            rows.append(DiffRow(**row, num_differing=differing, problem=problem))
            continue
        rmse, _, worst = rms_errors(b, a)
        _, rms, _ = rms_errors(one.reference(key, output), one.reference(key, output))
        if draws or a.numel() < POOL_BELOW:
            rmse, rms = pooled_rmse, pooled_rms
        rows.append(_float_row(row, one, other, key, rmse, rms, worst))
    return rows


def _float_row(row: dict[str, Any], one: _Side, other: _Side | None, key: str, rmse: float, rms: float, worst: float) -> DiffRow:
    """The row of an output with rounding errors: the ratio is to the larger of the native errors, the bound the sum of both."""
    sides, output = [side for side in (one, other) if side is not None], row["output"]
    r = one.reference(key, output)
    natives = [side.native_rmse(key, output) for side in sides]

    def error(native: float) -> OutputError:
        return OutputError(rmse=rmse, native_rmse=native, rms=rms, dtype=r.dtype, num_elements=r.numel())

    bounds = [golden_bound(error(native), side.gate)[1] for side, native in zip(sides, natives, strict=True)]
    ratio, _ = golden_bound(error(max(natives)), one.gate)
    bound = math.fsum(bounds)
    problem = None if rmse <= bound else f"rmse {rmse:.3g} > {bound:.3g}"
    return DiffRow(**row, error_ratio=ratio, max_abs_err=worst, rmse=rmse, bound=bound, problem=problem)
