"""FrozenModel: input contract, payload choice and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import freezer
from freezer.artifact import Payload
from freezer.errors import ContractError
from freezer.runtime.frozen_model import FrozenModel
from freezer.spec import ConstantSpec, Dim, InputSpec, TensorSpec
from tests.conftest import Frozen
from tests.support.steps import BATCH, frozen_function, plain_payload, random_inputs

LENGTH = Dim(name="length", min=2, max=8)
SPEC = InputSpec(
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=("batch", 3)),
        TensorSpec(name="y", dtype="int64", shape=("batch", "length")),
        ConstantSpec(name="rate", value=16),
    ),
    dims=(BATCH, LENGTH),
)


def payload_for(batch: int | None = None, num_threads: int | None = None) -> Payload:
    dims = (BATCH, LENGTH) if batch is None else (Dim(name="batch", min=batch, max=batch), LENGTH)
    return plain_payload("inductor", num_threads, path=f"payloads/{batch}", dims=dims)


def model_of(run: Callable[..., Any], *payloads: Payload) -> FrozenModel:
    """A frozen model whose payloads are Python functions that take the flat tensors."""
    example = {"x": torch.zeros(1, 3), "y": torch.zeros(1, 2, dtype=torch.int64)}
    result = dict(zip(("x", "y"), run(*example.values()), strict=True))
    return frozen_function(run, SPEC, result, *(payloads or (payload_for(),)))


@pytest.fixture
def echo() -> FrozenModel:
    return model_of(lambda x, y: [x, y])


X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"x": X, "y": Y}),
        ((X,), {"y": Y}),
        ((X, Y, 16), {}),
        ((), {"y": Y, "rate": 16, "x": X}),
    ],
)
def test_inputs_by_name_or_position(echo: FrozenModel, args: Any, kwargs: Any) -> None:
    got = echo(*args, **kwargs)
    assert torch.equal(got["x"], X)
    assert torch.equal(got["y"], Y)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"x": X}, "'y': got nothing"),
        ((), {"x": X, "y": [1]}, "'y': got list"),
        ((), {"x": X, "y": Y, "z": X}, "'z' is unknown"),
        ((X,), {"x": X, "y": Y}, "'x' is given twice"),
        ((X, Y, 16, 17), {}, "got 4 positional inputs"),
        ((X.double(), Y), {}, "'x': got dtype float64"),
        ((X.to("meta"), Y), {}, "'x': got device meta"),
        ((X[0], Y), {}, r"'x': got shape \[3\]"),
        ((X[:, :2], Y), {}, "with batch from 1 to 4, length from 2 to 8"),
        ((torch.zeros(5, 3), Y), {}, r"got shape \[5, 3\](?!.*before it)"),
        ((X, Y[:1]), {}, r"'y': got shape \[1, 4\].*\{'batch': 2\} in the inputs before it"),
        ((X, Y, 17), {}, "'rate': got 17, but 16 was baked in"),
        ((X, Y, torch.tensor([16, 16])), {}, "but 16 was baked in"),
        ((X.to_sparse(), Y), {}, "'x': got layout torch.sparse_coo"),
    ],
)
def test_wrong_inputs_are_refused(echo: FrozenModel, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        echo(*args, **kwargs)


@pytest.mark.parametrize(
    "awkward",
    [
        pytest.param(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), id="transposed"),
        pytest.param(lambda x: x.contiguous(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(lambda x: torch.cat([x, x], 3)[..., :16], id="sliced"),
        pytest.param(lambda x: x[:1].expand(2, 3, 16, 16), id="expanded"),
        pytest.param(
            lambda x: torch.cat([x.flatten(), x.flatten()])[1:][: x.numel()].view(x.shape),
            id="shifted",
        ),
        pytest.param(lambda x: x._neg_view(), id="negative"),
        pytest.param(lambda x: torch.complex(x, x).conj().imag, id="conjugate"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="with-gradient"),
    ],
)
def test_awkward_memory_gives_correct_results(
    inductor: Frozen, awkward: Callable[[Tensor], Tensor]
) -> None:
    x = awkward(random_inputs(2, 3, 16, 16, seed=5))
    got = freezer.load(inductor.artifact.folder, canary=False)(x)
    torch.testing.assert_close(got, inductor.model(x.detach().resolve_neg().clone()).detach())
    assert not got.requires_grad


def test_the_most_specific_payload_serves() -> None:
    model = model_of(lambda x, y: [x, y], payload_for(batch=1), payload_for())
    assert model.payload_for({"batch": 1, "length": 2}).path == "payloads/1"
    assert model.payload_for({"batch": 2, "length": 2}).path == "payloads/None"
    only_one = model_of(lambda x, y: [x, y], payload_for(batch=1))
    with pytest.raises(ContractError):
        only_one(X, Y)


def test_calls_use_the_payloads_thread_count() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        seen.append(torch.get_num_threads())
        if len(seen) > 2:
            raise RuntimeError("payload")
        return [x, y]

    model = model_of(run, payload_for(num_threads=before + 1))
    model(X, Y)
    assert seen[-1] == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="payload"):
        model(X, Y)
    assert torch.get_num_threads() == before
