"""Input sets: generated from seeds, read from files, and matched with a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freezer.errors import SpecError
from freezer.freezing.models.samples import cover_points, example_spec, match_samples
from freezer.runtime.input_sets import generate
from freezer.runtime.tensors import read_samples
from freezer.spec.inputs import InputSpec
from freezer.spec.items import TensorSpec
from freezer.spec.parse import declared_spec

SPEC = declared_spec(
    {"x": {"shape": ["batch", 4]}, "ids": {"shape": ["batch"], "dtype": "int64", "range": [3, 5]}}, {"batch": {"max": 9}}
)


def spec_of(**field: Any) -> InputSpec:
    return declared_spec({field.pop("name", "x"): {"shape": [1000], **field}}, {})


def test_generated_sets_cover_points_and_repeat() -> None:
    sets = generate(SPEC)
    assert len(sets) == 8
    assert [item.point["batch"] for item in sets] == [1, 9, 3, 1, 9, 3, 1, 9]
    assert list(sets[0].tensors) == ["x", "ids"]
    for one, other in zip(sets, generate(SPEC), strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert not torch.equal(sets[0].tensors["x"], sets[3].tensors["x"])
    assert len(generate(SPEC, num_sets=2)) == 3, "one per point"


def test_generated_values_fit_dtype_and_range() -> None:
    (normal, uniform, ids, coins, mask, brain, wave) = (
        generate(spec, num_sets=1)[0].tensors[spec.inputs[0].name]
        for spec in (
            spec_of(),
            spec_of(range=[2, 4]),
            spec_of(dtype="int32", range=[7, 9]),
            spec_of(dtype="bool"),
            declared_spec({"attention_mask": {"shape": [5, 20], "dtype": "int64"}}, {}),
            spec_of(dtype="bfloat16"),
            spec_of(dtype="complex128"),
        )
    )
    assert abs(float(normal.mean())) < 0.2
    assert 0.8 < float(normal.std()) < 1.2
    assert (float(uniform.min()) >= 2, float(uniform.max()) <= 4, float(uniform.std()) > 0.4) == (True, True, True)
    assert ids.dtype == torch.int32
    assert ids.unique().tolist() == [7, 8, 9]
    assert set(coins.tolist()) == {False, True}
    assert (mask[:, 0] == 1).all()
    assert (mask.diff(dim=1) <= 0).all(), "ones, then zeros"
    assert (mask == 0).any()
    assert (brain.dtype, wave.dtype) == (torch.bfloat16, torch.complex128)


def masks_of(name: str, dtype: str, *shape: int) -> list[torch.Tensor]:
    return [item.tensors[name] for item in generate(declared_spec({name: {"shape": list(shape), "dtype": dtype}}, {}))]


@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16"])
@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_generated_masks_are_ones_then_zeros(name: str, dtype: str) -> None:
    for shape in [(3, 7), (1, 2), (2, 1, 5, 5), (4,)]:
        masks = masks_of(name, dtype, *shape)
        for mask in masks:
            assert mask.dtype == getattr(torch, dtype)
            assert mask.shape == shape
            lengths = mask.to(torch.int64).sum(-1, keepdim=True)
            assert torch.equal(mask.to(torch.int64), (torch.arange(shape[-1]) < lengths).to(torch.int64)), "ones, then zeros"
            assert lengths.min() >= 1
        whole = [bool((mask != 0).all()) for mask in masks]
        either = dtype == "bool" or name == "key_padding_mask"
        assert whole == [not either and index % 4 == 3 for index in range(8)]


def test_samples_reject_unknown_dtypes() -> None:
    with pytest.raises(SpecError, match="input 'x': dtype 'uint16' is unknown"):
        example_spec({"x": torch.zeros(2, dtype=torch.uint16)}, {})


def test_mask_example_gets_no_range() -> None:
    spec, _ = example_spec({"attention_mask": torch.ones(2, 6, dtype=torch.int64), "mask_ids": torch.tensor([0, 7])}, {})
    assert [item.range for item in spec.tensors] == [None, (0, 7)]
    assert (generate(spec)[0].tensors["attention_mask"] == 0).any()


def test_integer_input_needs_a_range() -> None:
    with pytest.raises(SpecError, match=r"input 'x': an integer input needs `range: \[low, high\]`"):
        generate(spec_of(dtype="int64"))


@pytest.fixture(params=[".safetensors", ".npz"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(path: Path, **arrays: Any) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file({name: torch.from_numpy(array).clone() for name, array in arrays.items()}, path)
    return path


X, IDS = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([3, 5])


def test_file_holds_one_or_several_sets(tmp_path: Path, suffix: str) -> None:
    (single,) = read_samples(write(tmp_path / f"one{suffix}", x=X, ids=IDS))
    assert sorted(single) == ["ids", "x"]
    np.testing.assert_array_equal(single["x"], X)
    several = read_samples(
        write(tmp_path / f"many{suffix}", **{"0/x": X, "1/x": X + 1, "10/x": X, **{f"{i}/x": X for i in range(2, 10)}})
    )
    assert len(several) == 11
    np.testing.assert_array_equal(several[1]["x"], X + 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [(("0/x", "y"), "mix `<index>/<name>` with plain names"), (("0/x", "2/x"), r"set indices are \[0, 2\]; expected 0 to 1")],
)
def test_keys_must_form_sets(tmp_path: Path, suffix: str, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_samples(write(tmp_path / f"file{suffix}", **dict.fromkeys(keys, X)))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 is how a zip begins", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_unreadable_file_is_an_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=f"samples .*bad{suffix}.*expected a readable"):
        read_samples(path)
    with pytest.raises(SpecError, match="No such file"):
        read_samples(tmp_path / f"none{suffix}")


def test_pickle_in_npz_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="allow_pickle"):
        read_samples(write(tmp_path / "pickle.npz", x=np.array([object()], dtype=object)))


def given(**tensors: Any) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(2, 4), "ids": torch.tensor([3, 4])} | tensors]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([{"x": torch.zeros(2, 4)}], r"sample set 0: got tensors \['x'\], expected the inputs \['ids', 'x'\]"),
        (given(x=torch.zeros(2, 4).double()), "input 'x': got dtype float64, expected float32"),
        (given(x=torch.zeros(2, 4, 1)), r"got shape \[2, 4, 1\], expected \['batch', 4\]"),
        (given(x=torch.zeros(3, 4)), "input 'ids': dim 'batch' is 2, expected one size for all inputs, 1 to 9"),
        (given(x=torch.zeros(10, 4), ids=torch.zeros(10, dtype=torch.int64)), "dim 'batch' is 10"),
    ],
)
def test_samples_must_fit_the_spec(sets: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        match_samples(sets, SPEC)


def test_sets_respect_multiples() -> None:
    spec = declared_spec({"x": {"shape": ["n"]}}, {"n": {"min": 4, "max": 44, "multiple_of": 4}})
    assert {item.tensors["x"].shape[0] for item in generate(spec)} == {4, 12, 44}
    assert {item.point["n"] for item in cover_points(match_samples([{"x": torch.zeros(8)}], spec), spec)} == {8, 4, 12, 44}
    with pytest.raises(SpecError, match="dim 'n' is 6, expected one size for all inputs, 4 to 44 in multiples of 4"):
        match_samples([{"x": torch.zeros(6)}], spec)


def test_samples_follow_the_specs_order() -> None:
    (item,) = match_samples([{"ids": torch.tensor([3, 4]), "x": torch.zeros(4, 2).t()}], SPEC)
    assert list(item.tensors) == ["x", "ids"]
    assert item.tensors["x"].is_contiguous()
    assert item.point == {"batch": 2}


def test_missing_points_repeat_rows() -> None:
    sets = match_samples([{"x": torch.arange(8.0).reshape(2, 4), "ids": torch.tensor([3, 4])}], SPEC)
    covered = cover_points(sets, SPEC)
    assert [item.point["batch"] for item in covered] == [2, 1, 9, 3]
    assert covered[2].tensors["ids"].tolist() == [3, 4, 3, 4, 3, 4, 3, 4, 3]
    assert torch.equal(covered[3].tensors["x"][2], covered[0].tensors["x"][0])


def test_spec_of_an_example_has_integer_ranges() -> None:
    given = {"x": torch.zeros(2, 4), "ids": torch.tensor([3, 9]), "flag": torch.tensor([True])}
    assert example_spec(given, {})[0].inputs == (
        TensorSpec(name="x", dtype="float32", shape=(2, 4)),
        TensorSpec(name="ids", dtype="int64", shape=(2,), range=(3, 9)),
        TensorSpec(name="flag", dtype="bool", shape=(1,)),
    )
