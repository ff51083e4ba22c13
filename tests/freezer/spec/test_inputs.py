"""Declared specs: points, bounds and errors."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from freezer.codec import decode, encode
from freezer.errors import SpecError
from freezer.spec import Dim, InputSpec, TensorSpec, declared_spec

FULL: dict[str, Any] = {
    "ids": {"shape": ["batch", "length"], "dtype": "int64", "range": [0, 99]},
    "mask": {"shape": ["batch", "length"], "dtype": "bool"},
    "scale": {"shape": []},
    "rate": {"value": 16000},
    "nothing": {"value": None},
}
BOUNDS = {"batch": {"max": 16}, "length": {"min": 2, "max": 32}}


def test_declared_keyword_inputs() -> None:
    spec = declared_spec(FULL, BOUNDS)
    assert spec.style == "keyword"
    assert spec.dims == (Dim(name="batch", min=1, max=16), Dim(name="length", min=2, max=32))
    assert spec.tensors == (
        TensorSpec(name="ids", dtype="int64", shape=("batch", "length"), range=(0, 99)),
        TensorSpec(name="mask", dtype="bool", shape=("batch", "length")),
        TensorSpec(name="scale", dtype="float32", shape=()),
    )
    assert spec.constants == {"rate": 16000, "nothing": None}


def test_declared_positional_inputs() -> None:
    spec = declared_spec([{"shape": [1, 2]}, {"name": "rate", "value": 2}], {})
    assert spec.style == "positional"
    assert [item.name for item in spec.inputs] == ["input_0", "rate"]


def test_points_are_corners_then_the_middle() -> None:
    assert list(declared_spec(FULL, BOUNDS).points()) == [
        {"batch": 1, "length": 2},
        {"batch": 1, "length": 32},
        {"batch": 16, "length": 2},
        {"batch": 16, "length": 32},
        {"batch": 4, "length": 8},
    ]
    fixed = InputSpec(
        inputs=(TensorSpec(name="x", dtype="float32", shape=("n",)),),
        dims=(Dim(name="n", min=3, max=3),),
    )
    assert list(fixed.points()) == [{"n": 3}]
    assert list(InputSpec(inputs=()).points()) == [{}]
    assert declared_spec(FULL, BOUNDS).first_point() == {"batch": 1, "length": 2}


def test_many_dims_give_the_ends_of_each() -> None:
    dims = tuple(Dim(name=f"d{index}", min=4, max=16) for index in range(7))
    shape = tuple(dim.name for dim in dims)
    spec = InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=shape),), dims=dims)
    points = [tuple(point.values()) for point in spec.points()]
    assert points[:3] == [(4,) * 7, (16,) * 7, (8,) * 7]
    ends = [(8,) * axis + (end,) + (8,) * (6 - axis) for axis in range(7) for end in (4, 16)]
    assert sorted(points[3:]) == sorted(ends)


@pytest.mark.parametrize(
    ("inputs", "dims"),
    [
        ({"x": {"shape": ["n"]}}, {}),
        ({"x": {"shape": [1]}}, {"n": {"max": 2}}),
        ({"x": {"shape": ["n"]}}, {"n": {"min": 3, "max": 2}}),
        ({"x": {"shape": ["n"]}}, {"n": {"max": 8, "multiple_of": True}}),
        ({"x": {"shape": ["n"]}}, {"n": {"min": 4, "max": 16, "multiple_of": 8}}),
        ({"x": {"shape": ["n"]}}, {"n": {"min": 1}}),
        ({"x": {"shape": ["n"]}}, {"n": 4}),
        ({"x": {"shape": ["a b"]}}, {"a b": {"max": 4}}),
        ({"x": {"shape": [-1]}}, {}),
        ({"x": {"dtype": "float32"}}, {}),
        ({"x": {"shape": [1], "dtype": "float33"}}, {}),
        ({"x": {"shape": [1], "typo": 1}}, {}),
        ({"x": {"shape": [1], "range": [2, 1]}}, {}),
        ({"x": {"value": [1]}}, {}),
        ({"x": 3}, {}),
        ([{"name": "x", "shape": [1]}, {"name": "x", "shape": [1]}], {}),
        ({"x": {"shape": [1], "name": "y"}}, {}),
    ],
)
def test_errors_of_declarations(inputs: Any, dims: Any) -> None:
    with pytest.raises(SpecError, match=r"dim|input|'x'"):
        declared_spec(inputs, dims)


def test_dims_of_multiples() -> None:
    bounds = {
        "height": {"min": 32, "max": 128, "multiple_of": 8},
        "width": {"max": 44, "multiple_of": 4},
    }
    spec = declared_spec({"x": {"shape": ["height", "width"]}}, bounds)
    assert spec.dims[1] == Dim(name="width", min=4, max=44, multiple_of=4)
    assert all(point["height"] % 8 == point["width"] % 4 == 0 for point in spec.points())
    assert list(spec.points())[-1] == {"height": 64, "width": 12}, "13 is the middle of 4 and 44"
    assert list(spec.dims[1].sizes) == list(range(4, 45, 4))
    assert str(spec.dims[0]) == "height from 32 to 128 in multiples of 8"
    assert decode(InputSpec, json.loads(json.dumps(encode(spec))), origin="here") == spec


def test_records_copy_pickle_and_stay_as_they_are() -> None:
    dim = Dim(name="batch", min=1, max=8)
    assert copy.deepcopy(dim) == pickle.loads(pickle.dumps(dim)) == replace(dim) == dim
    assert {dim: 1}[replace(dim, max=8)] == 1
    assert list(inspect.signature(Dim).parameters)[:3] == ["name", "min", "max"]
    with pytest.raises(FrozenInstanceError, match="max"):
        dim.max = 9  # type: ignore[misc]
    with pytest.raises(TypeError, match="needs name, given by name"):
        Dim("batch", 1, 8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes name, min, max, multiple_of, given by name"):
        Dim(name="batch", min=1, max=8, most=3)  # type: ignore[call-arg]
