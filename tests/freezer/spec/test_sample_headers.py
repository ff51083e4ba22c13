"""Headers of sample files, read without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freezer.errors import SpecError
from freezer.freezing.models.samples import match_samples
from freezer.runtime.tensor_files import read_samples
from freezer.spec import DTYPES, InputSpec, TensorSpec, declared_spec, match_headers, read_header
from tests.support.steps import python

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
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 is how a zip begins", b"\xff" * 64])
def test_damaged_files_are_rejected(
    tmp_path: Path, suffix: str, content: bytes, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=f"samples .*bad{suffix}.*expected a readable") as caught:
        read(path)
    assert caught.value.code == "CP-SAMPLES"
    with pytest.raises(SpecError, match="No such file"):
        read(tmp_path / f"none{suffix}")


@pytest.mark.parametrize("read", READERS)
def test_other_contents_are_rejected(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    np.savez(tmp_path / "odd.npz", x=np.array([object()], dtype=object))
    with pytest.raises(SpecError, match="allow_pickle"):
        read(tmp_path / "odd.npz")
    with pytest.raises(SpecError, match=r"suffix '\.txt' is unknown"):
        read(tmp_path / "x.txt")


@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_files_are_rejected(tmp_path: Path, suffix: str, compressed: bool) -> None:
    whole = write(
        tmp_path / f"whole{suffix}", {"x": torch.arange(1000.0)}, compressed=compressed
    ).read_bytes()
    path = tmp_path / f"cut{suffix}"
    for size in (len(whole) // 2, len(whole) - 1, 100, 9):
        path.write_bytes(whole[:size])
        with pytest.raises(SpecError, match="expected a readable"):
            read_header(path)
    if compressed and suffix == ".npz":
        path.write_bytes(whole[:60] + b"\xff" * 20 + whole[80:])
        for read in READERS:
            with pytest.raises(SpecError, match="expected a readable"):
                read(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("0/x", "y"), "mix `<index>/<name>` with plain names"),
        (("0/x", "2/x"), r"set indices are \[0, 2\]; expected 0 to 1"),
    ],
)
def test_keys_must_form_sets(
    tmp_path: Path, suffix: str, keys: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path / f"file{suffix}", {key: torch.zeros(1) for key in keys})
    for read in READERS:
        with pytest.raises(SpecError, match=message) as caught:
            read(path)
        assert caught.value.code == "CP-SAMPLES"


def given(**tensors: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(2, 4), "ids": torch.tensor([3, 4])} | tensors]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            [{"x": torch.zeros(2, 4)}],
            r"sample set 0: got tensors \['x'\], expected the inputs \['ids', 'x'\]",
        ),
        (
            given(x=torch.zeros(2, 4).double()),
            "sample set 0, input 'x': got dtype float64, expected float32",
        ),
        (given(x=torch.zeros(2)), r"got shape \[2\], expected \['batch', 4\]"),
        (given(x=torch.zeros(2, 5)), r"got shape \[2, 5\]"),
        (
            given(x=torch.zeros(3, 4)),
            "input 'ids': dim 'batch' is 2, expected one size for all inputs, 1 to 9",
        ),
        (given(x=torch.zeros(10, 4), ids=torch.zeros(10, dtype=torch.int64)), "dim 'batch' is 10"),
        (
            [*given(), *given(x=torch.zeros(2, 4).half())],
            "sample set 1, input 'x': got dtype float16",
        ),
    ],
)
def test_headers_and_samples_match_the_spec(sets: Any, message: str) -> None:
    for match in (lambda: match_headers(headers_of(sets), SPEC), lambda: match_samples(sets, SPEC)):
        with pytest.raises(SpecError, match=message) as caught:
            match()
        assert caught.value.code == "CP-SAMPLES"


def test_match_headers_returns_points() -> None:
    sets = [*given(), *given(x=torch.zeros(9, 4), ids=torch.zeros(9, dtype=torch.int64))]
    assert match_headers(headers_of(sets), SPEC) == [{"batch": 2}, {"batch": 9}]
    fixed = InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=(0, 4)),))
    assert match_headers([{"x": ("float32", (0, 4))}], fixed) == [{}]
    assert match_headers([{}], InputSpec(inputs=())) == [{}]


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from freezer.spec.sample_headers import match_headers, read_header
assert "numpy" not in sys.modules
print([read_header(Path(path)) for path in sys.argv[1:]], "torch" in sys.modules)
"""
    paths = [write(tmp_path / name, {"x": torch.zeros(2)}) for name in ("a.npz", "a.safetensors")]
    header = [{"x": ("float32", (2,))}]
    assert python(code, *paths).strip() == f"{[header, header]} False"
