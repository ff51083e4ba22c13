"""Round trips of tensors through files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from freezer.runtime.tensor_files import load_tensors, save_tensors


def test_awkward_memory_round_trips(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4).to(torch.complex128) * (1 + 2j)
    tensors: dict[str, Tensor] = {
        "conj": base.conj(),
        "t": base.t(),
        "base": base,
        "again": base,
        "part": base[1:, ::2],
        "real": base.real,
    }
    path = tmp_path / "file.safetensors"
    save_tensors(tensors, path)
    found = load_tensors(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_complex128_is_aligned(tmp_path: Path) -> None:
    """The file aligns to 8 bytes; torch reads complex128 by 16 bytes and would crash without a
    copy.
    """
    path = tmp_path / "file.safetensors"
    for shift in range(3):
        save_tensors(
            {
                "a": torch.ones(shift, dtype=torch.float64),
                "z": torch.ones(7, 3, dtype=torch.complex128),
            },
            path,
        )
        z = load_tensors(path)["z"]
        assert z.data_ptr() % 16 == 0
        assert int(z[z.isfinite()].sum().real) == 21
