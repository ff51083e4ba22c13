"""The pyfunc loader: inputs, results and loading, without mlflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freezer.artifact import Artifact
from freezer.errors import ContractError, IncompatibleError
from freezer.pyfunc import PyfuncModel, _load_pyfunc
from freezer.spec import ConstantSpec, Dim, InputSpec, TensorSpec
from tests.conftest import Frozen
from tests.support.steps import copy_of, frozen_function, plain_payload

pd = pytest.importorskip("pandas")  # comes with mlflow

BATCH = Dim(name="batch", min=1, max=8)


def tensor(name: str, dtype: str = "float32", *rest: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", *rest))


def model_of(forward: Callable[..., Any], *inputs: TensorSpec | ConstantSpec) -> PyfuncModel:
    """A pyfunc around a frozen model whose payload is a Python function."""
    spec = InputSpec(inputs=inputs, dims=(BATCH,))
    example = {
        i.name: torch.zeros(i.at({"batch": 2}), dtype=getattr(torch, i.dtype)) for i in spec.tensors
    }
    payload = plain_payload("torchscript", dims=(BATCH,), convention="native")
    result = forward(**example, **spec.constants)
    return PyfuncModel(frozen_function(forward, spec, result, payload, as_numpy=True))


@pytest.fixture
def doubled() -> PyfuncModel:
    return model_of(lambda x: x * 2, tensor("x", "float32", 3))


@pytest.fixture
def columns() -> PyfuncModel:
    return model_of(
        lambda age, height: {"sum": age.float() + height}, tensor("age", "int32"), tensor("height")
    )


# Inputs


def read_only(array: np.ndarray) -> np.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: {"x": torch.from_numpy(x)},
        read_only,
        lambda x: x.astype(">f4"),
        lambda x: x.T.copy().T,
    ],
)
def test_arrays_and_tensors_are_accepted(doubled: PyfuncModel, wrap: Callable[[Any], Any]) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = doubled.predict(wrap(x))
    assert isinstance(answer, np.ndarray)
    assert answer.dtype == np.float32
    np.testing.assert_array_equal(answer, x * 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float32", "float64"),
        ("uint8", "int64"),
        ("bool", "bool"),
    ],
)
def test_lossless_dtypes_are_converted(given: str, expected: str) -> None:
    answer = model_of(lambda x: x, tensor("x", expected)).predict(np.array([0, 1], given))
    assert answer.dtype == np.dtype(expected)
    np.testing.assert_array_equal(answer, [0, 1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float64", "float32"),
        ("int64", "int32"),
        ("float32", "int64"),
        ("bool", "int64"),
    ],
)
def test_lossy_dtypes_are_refused(given: str, expected: str) -> None:
    model = model_of(lambda x: x, tensor("x", expected))
    with pytest.raises(ContractError):
        model.predict(np.array([0, 1], given))


def test_data_frame_columns_are_inputs(columns: PyfuncModel) -> None:
    frame = pd.DataFrame({"height": [1.5, 1.25], "age": [30, 40]})
    assert frame.dtypes.to_dict() == {"height": np.dtype("float64"), "age": np.dtype("int64")}
    answer = columns.predict(frame)
    np.testing.assert_array_equal(answer["sum"], np.array([31.5, 41.25], np.float32))


def test_data_frame_values_are_a_single_input(doubled: PyfuncModel) -> None:
    frame = pd.DataFrame([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], columns=["a", "b", "c"])
    np.testing.assert_array_equal(doubled.predict(frame), frame.to_numpy() * 2)
    single = model_of(lambda x: x * 2, tensor("x", "float32", 1))
    np.testing.assert_array_equal(single.predict(pd.DataFrame({"x": [1.0, 2.0]})), [[2.0], [4.0]])


def test_other_data_frames_are_refused(columns: PyfuncModel) -> None:
    with pytest.raises(ContractError):
        columns.predict(pd.DataFrame({"age": [2**40], "height": [1.5]}))
    with pytest.raises(ContractError):
        columns.predict(pd.DataFrame({"age": [30.5], "height": [1.5]}))
    with pytest.raises(ContractError):
        columns.predict(pd.DataFrame({"age": [30], "weight": [1.5]}))
    pair = model_of(lambda x, y: (x, y), tensor("x", "float32", 3), tensor("y"))
    with pytest.raises(ContractError, match="expected arrays by name"):
        pair.predict(pd.DataFrame({"x": [1.0], "y": [1.0]}))


def test_the_contract_is_enforced(columns: PyfuncModel, doubled: PyfuncModel) -> None:
    with pytest.raises(ContractError):
        columns.predict(np.zeros(2))
    with pytest.raises(ContractError):
        doubled.predict({"x": [[1.0, 2.0, 3.0]]})
    with pytest.raises(ContractError):
        doubled.predict(np.zeros((1, 3), np.float32), params={"top_k": 3})


# Results


def test_results_have_the_models_structure() -> None:
    model = model_of(lambda x: (x, {"twice": [x * 2], "none": None}), tensor("x"))
    first, rest = model.predict(np.ones(2, np.float32))
    assert isinstance(first, np.ndarray)
    assert isinstance(rest, dict)
    assert rest["none"] is None
    np.testing.assert_array_equal(rest["twice"][0], [2, 2])


def test_bfloat16_tensors_become_float32_arrays() -> None:
    model = model_of(lambda x: x, tensor("x", "bfloat16"))
    answer = model.predict(torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    assert answer.dtype == np.float32
    np.testing.assert_array_equal(answer, [1.5, 2.5])
    np.testing.assert_array_equal(model.predict(np.ones(2, np.float32)), [1, 1])
    with pytest.raises(ContractError):
        model.predict(np.full(2, 1.1, np.float32))


# Loading


@pytest.fixture
def artifact(portable: Frozen) -> Artifact:
    return portable.artifact


def test_the_thread_count_is_configurable(artifact: Artifact, tmp_path: Path) -> None:
    num_threads = torch.get_num_threads() + 1
    copy_of(
        artifact,
        tmp_path,
        payloads=tuple(replace(p, num_threads=num_threads) for p in artifact.manifest.payloads),
    )
    with pytest.raises(IncompatibleError):
        _load_pyfunc(str(tmp_path))
    assert _load_pyfunc(str(tmp_path), {"threads": num_threads}).predict(
        np.ones((1, 4), np.float32)
    ).shape == (1, 3)
