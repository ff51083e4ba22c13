"""NumPy arrays as payloads read them, made of whatever has `__dlpack__` or `__array__`. Imports no
torch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

BFLOAT16 = np.dtype("V2")
"""Dtype of arrays with the bits of bfloat16, which numpy lacks."""

_MANTISSA_BITS = 16
"""Bits of float32 that bfloat16 lacks."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of arrays by torch's name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def name_of(dtype: np.dtype[Any]) -> str:
    """Torch's name of an array's dtype."""
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def widened(array: Array) -> Array:
    """bfloat16 as float32; other arrays unchanged."""
    if array.dtype != BFLOAT16:
        return array
    bits = array.view(np.uint16).astype(np.uint32)
    bits <<= _MANTISSA_BITS
    return bits.view(np.float32)


def narrowed(array: Array) -> Array:
    """float32 rounded to bfloat16, as torch does; NaN stays NaN."""
    bits = np.array(array, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> _MANTISSA_BITS & 1)
    whole = np.where(np.isnan(array), bits | 0x400000, rounded)
    return np.asarray(whole >> _MANTISSA_BITS, np.uint16).view(BFLOAT16)


def array_of(value: Any) -> Array | None:
    """An array on the memory of a value, where its owner allows that; None if the value is neither
    an array nor a tensor.

    Raises:
        Exception: the values are on another device, or numpy lacks their dtype; its type is the
            owner's.
    """
    if isinstance(value, np.ndarray | np.generic):
        return _own_bits(np.asarray(value))
    plain = value.detach() if hasattr(value, "detach") else value
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        bits = plain.view(sys.modules["torch"].int16)
        return np.from_dlpack(bits).view(BFLOAT16)
    if hasattr(plain, "__array__"):
        return _own_bits(np.asarray(plain))
    return np.from_dlpack(plain) if hasattr(plain, "__dlpack__") else None


def readable(array: Array) -> Array:
    """An array as C code reads it: contiguous, aligned and writable; a copy if it is not."""
    return array if array.flags.carray else np.require(array, requirements=("C", "A", "W"))


def _own_bits(array: Array) -> Array:
    """Arrays of ml_dtypes' bfloat16, which JAX and TensorFlow return, as those of BFLOAT16."""
    return array.view(np.uint16).view(BFLOAT16) if array.dtype.name == "bfloat16" else array
