"""Headers of sample files, read without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freezer.errors import SpecError
from freezer.runtime.input_sets import match_samples
from freezer.runtime.tensor_files import read_samples
from freezer.spec import DTYPES, declared_spec, match_headers, read_header

SPEC = declared_spec(
    {"x": {"shape": ["batch", 4]}, "ids": {"shape": ["batch"], "dtype": "int64", "range": [3, 5]}},
    {"batch": {"max": 9}},
)


@pytest.fixture(params=[".safetensors", ".npz"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(path: Path, tensors: dict[str, torch.Tensor], *, compressed: bool = False) -> Path:
    if path.suffix == ".npz":
        save = np.savez_compressed if compressed else np.savez
        save(path, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    else:
        save_file(tensors, path)
    return path


def headers_of(sets: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    return [
        {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in given.items()}
        for given in sets
    ]


def test_headers_equal_the_tensors(tmp_path: Path, suffix: str) -> None:
    lacks = "complex128" if suffix == ".safetensors" else "bfloat16"
    tensors = {
        dtype: torch.zeros(2, 3, dtype=getattr(torch, dtype)) for dtype in DTYPES if dtype != lacks
    }
    path = write(
        tmp_path / f"all{suffix}",
        {**tensors, "scalar": torch.tensor(1.5), "none": torch.zeros(0, 4)},
    )
    assert read_header(path) == headers_of(read_samples(path))
    several = {f"{index}/state.0": torch.zeros(index + 1) for index in range(11)}
    path = write(tmp_path / f"several{suffix}", several, compressed=True)
    assert read_header(path) == headers_of(read_samples(path))
    assert read_header(path)[10] == {"state.0": ("float32", (11,))}


def test_headers_of_huge_files(tmp_path: Path) -> None:
    """A sparse file with a tensor larger than the memory."""
    header = b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * 2**40)
    assert read_header(path) == [{"x": ("float32", (2**40,))}]


READERS = (read_header, read_samples)


@pytest.mark.parametrize("read", READERS)
def test_damaged_files_are_rejected(
    tmp_path: Path, suffix: str, read: Callable[[Path], Any]
) -> None:
    whole = write(tmp_path / f"whole{suffix}", {"x": torch.arange(1000.0)}, compressed=True)
    data = whole.read_bytes()
    cut = [data[:size] for size in (len(data) // 2, len(data) - 1, 100, 9)]
    path = tmp_path / f"bad{suffix}"
    for content in (b"", b"PK\x03\x04 is how a zip begins", b"\xff" * 64, *cut):
        path.write_bytes(content)
        rejected(read, path)
    rejected(read, tmp_path / f"none{suffix}")


def rejected(read: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(SpecError) as caught:
        read(*arguments)
    assert caught.value.code == "CP-SAMPLES"


@pytest.mark.parametrize("read", READERS)
def test_other_contents_are_rejected(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    pickled, flipped = tmp_path / "odd.npz", tmp_path / "flipped.npz"
    np.savez(pickled, x=np.array([object()], dtype=object))
    whole = write(flipped, {"x": torch.arange(1000.0)}, compressed=True).read_bytes()
    flipped.write_bytes(whole[:60] + b"\xff" * 20 + whole[80:])
    for path in (pickled, flipped, tmp_path / "x.txt"):
        rejected(read, path)


def test_a_pipe_is_rejected(tmp_path: Path) -> None:
    """It would never end."""
    os.mkfifo(tmp_path / "pipe.npz")
    rejected(read_header, tmp_path / "pipe.npz")


@pytest.mark.parametrize("keys", [("0/x", "y"), ("0/x", "2/x")])
def test_keys_must_form_sets(tmp_path: Path, suffix: str, keys: tuple[str, ...]) -> None:
    path = write(tmp_path / f"file{suffix}", {key: torch.zeros(1) for key in keys})
    for read in READERS:
        rejected(read, path)


def given(**tensors: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(2, 4), "ids": torch.tensor([3, 4])} | tensors]


@pytest.mark.parametrize(
    "sets",
    [
        [{"x": torch.zeros(2, 4)}],
        given(x=torch.zeros(2, 4).double()),
        given(x=torch.zeros(2)),
        given(x=torch.zeros(2, 5)),
        given(x=torch.zeros(3, 4)),
        given(x=torch.zeros(10, 4), ids=torch.zeros(10, dtype=torch.int64)),
        [*given(), *given(x=torch.zeros(2, 4).half())],
    ],
)
def test_headers_and_samples_match_the_spec(sets: Any) -> None:
    rejected(match_headers, headers_of(sets), SPEC)
    rejected(match_samples, sets, SPEC)
