"""Compare numpy arrays as numerics.py compares tensors, for a canary without torch. Imports no
torch.

A test compares the two over many perturbed outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freezer.compare.gate import EAGER_REFERENCE_TOL, Sums, blocks, eps_of

_Array = NDArray[Any]


def is_rounded(array: _Array) -> bool:
    """Whether the dtype has rounding errors; integers and bools must be equal."""
    return array.dtype.kind in "fc"


def wide(array: _Array) -> _Array:
    """Convert to float64 or complex128."""
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64)


def array_problem(
    r: _Array, c: _Array, limits: Sequence[float] = (), *, drawn: bool = False
) -> str | None:
    """See `exact_problem`."""
    if c.shape != r.shape:
        return f"got shape {list(c.shape)}, expected {list(r.shape)}"
    if c.dtype != r.dtype:
        return f"got dtype {c.dtype}, expected {r.dtype}"
    if not is_rounded(r):
        num_wrong = 0 if drawn else int(np.count_nonzero(r != c))
        return f"{num_wrong} of {r.size} elements differ" if num_wrong else None
    finite = np.isfinite(r)
    if not np.array_equal(finite, np.isfinite(c)) or not np.array_equal(
        r[~finite], c[~finite], equal_nan=True
    ):
        return "NaN or Inf at other places"
    for sums in array_distances(r, c, limits)[1:] if limits else ():
        if not sums.rmse <= max(EAGER_REFERENCE_TOL, 4 * eps_of(r.dtype)) * sums.rms:
            return f"the greatest values, of {sums.rms:.3g}, are off by {sums.rmse:.3g}"
    return None


def array_distances(r: _Array, c: _Array, limits: Sequence[float] = ()) -> list[Sums]:
    """See `distances`."""
    found = [Sums() for _ in range(len(limits) + 1)]
    eps = eps_of(c.dtype)
    for block in blocks(r.shape):
        reference, output = wide(r[block]).ravel(), wide(c[block]).ravel()
        finite = np.isfinite(reference) & np.isfinite(output)
        reference, output = reference[finite], output[finite]
        sizes = abs(reference)
        for sums, low, high in zip(found, (0.0, *limits), (*limits, math.inf), strict=True):
            part = (low <= sizes) & (sizes < high) if limits else slice(None)
            _add(sums, reference[part], output[part], eps)
    return found


def _add(sums: Sums, r: _Array, c: _Array, eps: float) -> None:
    if not r.size:
        return
    with np.errstate(all="ignore"):
        error, largest = abs(c - r), np.maximum(np.maximum(abs(c), abs(r)), eps)
        sums.num_elements += r.size
        sums.noise += float(np.square(error).sum())
        sums.signal += float(np.square(abs(r)).sum())
        sums.power += float(np.square(abs(c)).sum())
        sums.inner += float((c * r.conj()).sum().real)
        sums.max_abs_err = max(sums.max_abs_err, float(error.max()))
        sums.max_rel_err = max(sums.max_rel_err, float((error / largest).max()))
