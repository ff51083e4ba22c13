"""Files of inputs that do not fit `mlp`: for `coldpress run`, and as bodies of requests."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from tests.support.services import X, tensor_of

GOOD = save({"x": X})


def listed_as_pair(listed: str, shape: Sequence[int]) -> bytes:
    """A .safetensors file with float64 zeros `x` and a list of tensors that are complex128."""
    size_bytes = 8 * int(np.prod(shape))
    entry = {"dtype": "F64", "shape": shape, "data_offsets": [0, size_bytes]}
    header = json.dumps({"__metadata__": {"complex128": listed}, "x": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size_bytes)


def npz(data: bytes, name: str = "x.npy") -> bytes:
    """A .npz file with one compressed member."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def npy(descr: Any, shape: object, data: bytes = b"", version: int = 1) -> bytes:
    """A .npy file with any header."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


TENSOR_FILES: Mapping[str, bytes] = {
    "empty": b"",
    "text": b"text" * 99,
    "truncated": GOOD[:-5],
    "truncated header": GOOD[:20],
    "more bytes": GOOD + b"more",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "no tensor": save({}),
    "other name": save({"y": X}),
    "one more": save({"x": X, "y": X + 1}),
    "self": save({"self": X}),
    "args": save({"args": X}),
    "no name": save({"": X}),
    "second set": save({"1/x": X}),
    "superscript set": save({"²/x": X}),
    "huge set": save({f"{'9' * 5000}/x": X}),
    "rank 0": save({"x": X[0, 0]}),
    "rank 1": save({"x": X[0]}),
    "rank 100": tensor_of("F32", [1] * 100, 4),
    "no rows": save({"x": X[:0]}),
    "no columns": save({"x": X[:, :0]}),
    "many rows": save({"x": torch.zeros(99, 4)}),
    "beyond int64": tensor_of("F32", [2**63, 0], 0),
    "beyond int64 last": tensor_of("F32", [0, 2**64 - 1], 0),
    "terabytes": tensor_of("F32", [2**40, 4], 32),
    "negative": tensor_of("F32", [-2, 4], 32),
    **{str(dtype): save({"x": X.to(dtype)}) for dtype in (torch.float64, torch.int64, torch.bool)},
    "float8": tensor_of("F8_E4M3", [2, 4], 8),
    "float8 of scales": tensor_of("F8_E8M0", [2, 4], 8),
    "float4": tensor_of("F4", [2, 4], 4),
    "uint16": tensor_of("U16", [2, 4], 16),
    "other dtype": tensor_of("F31", [2, 4], 31),
    "complex128": listed_as_pair('["x"]', (2, 4, 2)),
    "half a pair": listed_as_pair('["x"]', (2, 4, 1)),
    "scalar pair": listed_as_pair('["x"]', ()),
    "pairs null": listed_as_pair("null", (2, 4)),
    "pairs nested": listed_as_pair("[" * 100_000, (2, 4)),
}
"""Files with the suffix .safetensors."""


def arrays(**named: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **named)
    return file.getvalue()


_GOOD = arrays(x=X.numpy())

ARRAY_FILES: Mapping[str, bytes] = {
    "empty": b"",
    "text": b"text" * 99,
    "truncated": _GOOD[:-30],
    "no array": arrays(),
    "self": arrays(self=X.numpy()),
    "files": arrays(x=X.numpy(), files=X.numpy()),
    "objects": arrays(x=np.array([{}], dtype=object)),
    "pickle": npz(pickle.dumps([1.0])),
    "pickle without suffix": npz(pickle.dumps([1.0]), "x"),
    "folder": npz(b"", "x/"),
    "text in it": npz(b"text", "x.txt"),
    "big endian": arrays(x=X.numpy().astype(">f4")),
    "text array": arrays(x=np.array(["a"])),
    "dates": arrays(x=np.array(["2026"], dtype="M8[s]")),
    "fields": arrays(x=np.zeros(2, dtype=[("a", "f4")])),
    "long double": arrays(x=X.numpy().astype(np.longdouble)),
    "other version": npz(npy("<f4", (2, 4), bytes(32), version=9)),
    "too few bytes": npz(npy("<f4", (2, 4), bytes(3))),
    "terabytes": npz(npy("<f4", (2**40, 4))),
    "beyond int64": npz(npy("<f4", (2**63, 0))),
    "beyond int64 last": npz(npy("<f4", (0, 2**70))),
    "negative": npz(npy("<f4", (-2, -4), bytes(32))),
    "rank 100": npz(npy("<f4", (1,) * 100, bytes(4))),
    "shape of text": npz(npy("<f4", "24", bytes(32))),
    "shape of bools": npz(npy("<f4", (True, 4), bytes(16))),
    "nested header": npz(npy("<f4", "(" * 60_000, version=2)),
    "header not Python": npz(b"\x93NUMPY\x01\x00\x05\x00\0\0\0\0\0"),
}
"""Files with the suffix .npz."""
