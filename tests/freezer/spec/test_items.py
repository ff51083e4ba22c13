"""Nested inputs: declarations, JSON, splitting and building arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freezer.codec import decode, encode
from freezer.errors import ContractError, SpecError
from freezer.spec import InputItem, InputSpec, declared_spec, take_apart

NESTED: dict[str, Any] = {
    "x": {"shape": ["batch", 4]},
    "state": {"tuple": [{"shape": [2, "batch"]}, {"list": [{"shape": []}, {"value": 3}]}]},
    "opts": {
        "dict": {
            "scale": {"shape": [1]},
            "mode": {"value": "fast"},
            "deep": {"dict": {"a": {"shape": [1], "dtype": "bool"}}},
        }
    },
    "none": {"list": []},
}
SPEC = declared_spec(NESTED, {"batch": {"max": 4}})


def item(name: str) -> InputItem:
    return next(found for found in SPEC.inputs if found.name == name)


def test_round_trips_keep_the_order_of_dicts() -> None:
    spec = declared_spec(
        {"d": {"dict": {"b": {"shape": [1]}, "a": {"shape": [2], "range": [0, 1]}}}, **NESTED},
        {"batch": {"max": 4}},
    )
    read = decode(InputSpec, json.loads(json.dumps(encode(spec), sort_keys=True)), origin="here")
    assert read == spec
    assert [tensor.name for tensor in read.tensors][:2] == ["d.b", "d.a"]


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("state", None, "state"),
        ("state", (1,), "state"),
        ("state", (1, {"0": 1}), "state.1"),
        ("opts", (1,), "opts"),
        ("opts", {"scael": 1}, "opts"),
        ("opts", {"deep": {1: 1}}, "opts.deep"),
        ("none", [1], "none"),
    ],
)
def test_errors_of_arguments_name_the_path(name: str, value: Any, path: str) -> None:
    with pytest.raises(ContractError, match=f"input '{path}'"):
        dict(take_apart(item(name), value))


@pytest.mark.parametrize(
    ("inputs", "path"),
    [
        ({"x": {"tuple": {"shape": [1]}}}, "x"),
        ({"x": {"dict": [1]}}, "x"),
        ({"x": {"dict": {1: {"shape": [1]}}}}, "x"),
        ({"x": {"tuple": [], "shape": [1]}}, "x"),
        ({"x": {"dict": {"a": {"shape": ["n"]}}}}, "x.a"),
        ({"x": {"dict": {"a": {"value": float("nan")}}}}, "x.a"),
        ({"x": {"dict": {"a.b": {"shape": []}, "a": {"dict": {"b": {"shape": []}}}}}}, "x.a.b"),
        ({"x": {"tuple": [{"shape": [1]}]}, "x.0": {"shape": [1]}}, "x.0"),
    ],
)
def test_errors_of_nested_declarations(inputs: Any, path: str) -> None:
    with pytest.raises(SpecError, match=f"input '{path}'"):
        declared_spec(inputs, {})


@pytest.mark.parametrize(
    ("dtype", "low_high"),
    [
        ("uint8", [0, 256]),
        ("uint8", [-1, 5]),
        ("int64", [0.5, 2]),
        ("int64", [0, float("inf")]),
        ("complex64", [0, 1]),
    ],
)
def test_ranges_must_fit_the_dtype(dtype: str, low_high: list[float]) -> None:
    inputs = {"x": {"shape": [1], "dtype": dtype}}
    assert declared_spec(inputs, {}).tensors[0].range is None
    with pytest.raises(SpecError, match=dtype):
        declared_spec({"x": {**inputs["x"], "range": low_high}}, {})
