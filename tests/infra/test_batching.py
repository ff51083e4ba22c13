"""Requests that the service joins into one call: which models allow it, and that each request gets
its own answer or error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import freezer
from freezer.artifact import GOLDEN_OUTPUTS
from freezer.errors import ContractError, UsageError
from freezer.spec import Dim, InputSpec, TensorSpec
from freezer.store import Store
from infra.serving.batching import Batcher, GoldenCall, Joint, joint_of, output_shapes
from infra.serving.bodies import BINARY
from tests.conftest import Frozen
from tests.support.raylets import wait_until
from tests.support.served import Held, serving
from tests.support.steps import HERE, artifact_of, quickly, random_inputs

Call = Callable[[Mapping[str, Any]], dict[str, Any]]

BATCH, SEQ = Dim(name="batch", min=1, max=4), Dim(name="seq", min=1, max=8)
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
SPEC = InputSpec(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", "seq")),), dims=(BATCH, SEQ)
)
SHAPES = {"y": ("batch", "seq")}
GOLDEN = [GoldenCall(point={"batch": 4, "seq": 8}, inputs={"x": X})]


def test_requests_are_joined_along_the_first_independent_dim() -> None:
    """`batch` comes first; where it mixes, such as in softmax over it, `seq` is taken."""
    joint = joint_of(SPEC, SHAPES, GOLDEN, lambda given: {"y": given["x"] * 2})
    assert (joint.dim, joint.inputs, joint.outputs) == (BATCH, {"x": 0}, {"y": 0})
    joint = joint_of(SPEC, SHAPES, GOLDEN, lambda given: {"y": given["x"] - given["x"].mean(0)})
    assert (joint.dim, joint.inputs, joint.outputs) == (SEQ, {"x": 1}, {"y": 1})


@pytest.mark.parametrize(
    ("shapes", "call"),
    [
        (SHAPES, lambda given: {"y": given["x"] - given["x"].mean()}),
        (SHAPES, lambda given: {"y": given["x"].argsort(axis=None).reshape(given["x"].shape)}),
        ({"y": ("batch", None)}, lambda given: {"y": given["x"][::-1]}),
        ({"y": (3,)}, lambda given: {"y": given["x"][0, :3]}),
        ({"y": ("batch", "batch")}, lambda given: {"y": given["x"] @ given["x"].T}),
    ],
    ids=["mean", "integers", "order", "no-dim", "twice"],
)
def test_models_that_mix_requests_are_refused(
    shapes: dict[str, tuple[int | str | None, ...]], call: Call
) -> None:
    with pytest.raises(UsageError):
        joint_of(SPEC, shapes, GOLDEN, call)


def test_golden_inputs_must_hold_two_requests() -> None:
    golden = [GoldenCall(point={"batch": 1, "seq": 1}, inputs={"x": X[:1, :1]})]
    with pytest.raises(UsageError):
        joint_of(SPEC, SHAPES, golden, lambda given: {"y": given["x"]})


def test_shapes_of_outputs_come_from_golden_sets(scripted: Frozen) -> None:
    """A size is the dim's if it always is, and fixed only if every dim varied."""
    manifest = scripted.artifact.manifest
    path = scripted.artifact.folder / GOLDEN_OUTPUTS
    assert output_shapes(manifest, path) == {"output": ["batch", 3]}
    first = replace(manifest, golden=manifest.golden[:1])
    assert output_shapes(first, path) == {"output": [None, None]}
    others = [replace(item, point={"batch": 5 - item.point["batch"]}) for item in manifest.golden]
    assert output_shapes(replace(manifest, golden=tuple(others)), path) == {"output": [None, 3]}


class Recorded:
    """A model that doubles, refuses negative values, and records the sizes of its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.sizes.append(len(given["x"]))
        if (given["x"] < 0).any():
            raise ContractError("negative")
        return {"y": given["x"] * 2}


JOINT = Joint(dim=BATCH, inputs={"x": 0}, outputs={"y": 0})


def answers(
    call: Call, requests: list[Any], *, max_size: int = 4, delay_s: float = 0.05
) -> list[Any]:
    """The outputs or errors of requests that arrive together."""

    async def answer_all(worker: ThreadPoolExecutor) -> list[Any]:
        batcher = Batcher(worker, max_size=max_size, max_delay_s=delay_s, observe=lambda _: None)
        waiting = [batcher.answer(call, JOINT, {"x": given}) for given in requests]
        return await asyncio.gather(*waiting, return_exceptions=True)

    with ThreadPoolExecutor(1) as worker:
        return asyncio.run(answer_all(worker))


def rows(num: int, value: float, width: int = 2) -> Any:
    return np.full((num, width), value, np.float32)


def test_waiting_requests_are_joined_up_to_the_limit() -> None:
    model, given = Recorded(), [rows(1, 1.0), rows(2, 2.0), rows(1, 3.0), rows(1, 4.0)]
    found = answers(model, given)
    assert model.sizes == [4, 1]
    for before, after in zip(given, found, strict=True):
        np.testing.assert_array_equal(after["y"], before * 2)


def test_only_requests_of_the_same_shape_are_joined() -> None:
    model = Recorded()
    found = answers(model, [rows(1, 1.0), rows(1, 2.0, width=3), rows(1, 3.0)])
    assert model.sizes == [2, 1]
    assert [item["y"].shape for item in found] == [(1, 2), (1, 3), (1, 2)]


def test_a_wrong_request_fails_alone() -> None:
    found = answers(Recorded(), [rows(1, 1.0), rows(1, -1.0), rows(1, 3.0)])
    assert [type(item) for item in found] == [dict, ContractError, dict]
    np.testing.assert_array_equal(found[2]["y"], rows(1, 6.0))


def test_requests_beyond_the_dim_are_not_joined() -> None:
    """The contract's limit holds for each, also where --max-batch is larger."""
    model = Recorded()
    answers(model, [rows(3, 1.0), rows(2, 1.0), rows(7, 1.0)], max_size=100)
    assert sorted(model.sizes) == [2, 3, 7]


def test_the_service_answers_joined_requests(published: Store) -> None:
    """What waits while the model runs becomes one call; a wrong request among them gets 422."""
    model = freezer.load("mlp", store=published.uri, device_class=HERE)
    given = [random_inputs(1, 4), random_inputs(2, 4) + 1, random_inputs(1, 4) + 2]
    with serving(published, max_batch=4, reload_s=60) as started, ThreadPoolExecutor() as clients:
        started.wait_for_version(1)
        loaded = started.server.loaded
        assert loaded is not None
        assert loaded.prepared.joint == Joint(dim=BATCH, inputs={"x": 0}, outputs={"output": 0})
        held = Held(loaded.model)
        started.server.watched.loaded = replace(loaded, model=held)
        first = clients.submit(started.predict, save({"x": given[0]}), BINARY)
        assert held.entered.wait(60)
        others = [clients.submit(started.predict, save({"x": x}), BINARY) for x in given]
        wrong = clients.submit(started.predict, save({"x": given[0][:, :3]}), BINARY)
        wait_until(lambda: wrong.done(), "the wrong request is refused")
        wait_until(lambda: started.metric("queue_length") == 3, "the others wait")
        held.released.set()
        for x, answer in zip((given[0], *given), (first, *others), strict=True):
            torch.testing.assert_close(load(answer.result().content)["output"], model(x))
        assert wrong.result().status_code == 422
        assert started.metric("batch_requests_sum") == 4
        assert started.metric("batch_requests_count") == 2


class Centered(nn.Module):
    """Its requests affect one another."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_models_that_cannot_be_joined_are_not_served(scripted: Frozen, tmp_path: Path) -> None:
    """The one that serves stays."""
    store = Store.open(str(tmp_path / "store"), create=True)
    x = {"x": random_inputs(2, 4)}
    mixing = artifact_of(
        quickly(Centered(), x, tmp_path / "out", dims={"x": {0: BATCH}}, name="mlp")
    )
    store.publish("mlp", source_key="a", artifacts=[scripted.artifact])
    with serving(store, max_batch=4) as started:
        started.wait_for_version(1)
        store.publish("mlp", source_key="b", artifacts=[mixing])
        started.wait_for("reloads_total", outcome="failed")
        assert started.serves(1)
        failed = started.metric("reloads_total", outcome="failed")
        time.sleep(1)
        assert started.metric("reloads_total", outcome="failed") == failed, "it is loaded again"
    with serving(store, max_batch=4) as started:
        started.wait_for("reloads_total", outcome="failed")
        answer = started.get("/ready")
        assert (answer.status_code, "--max-batch" in answer.json()["detail"]) == (503, True)
