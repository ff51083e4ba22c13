"""Models that follow a name of their store, and the sentinel that checks some of their calls."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import freezer
from freezer.errors import IncompatibleError, UsageError
from freezer.serving.following import WatchedModel
from freezer.serving.sentinel import BUDGET, SLOW, Sentinel
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.commands import finished
from tests.support.raylets import ROOT, wait_until
from tests.support.services import X, publish, with_golden
from tests.support.steps import HERE, artifact_of, python, quickly, random_inputs

NUM_CALLS = 1000


def served(model: WatchedModel) -> str:
    assert model.loaded is not None
    return model.loaded.labels["version"]


def test_a_watched_model_follows_its_name(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    publish(store, with_golden(scripted.artifact, tmp_path / "second", error=0.0))
    publish(store, with_golden(scripted.artifact, tmp_path / "wrong", error=1.0))
    store.promote("mlp:1", "prod")
    loaded = freezer.load("mlp:prod", store=store.uri, device_class=HERE)
    expected = loaded(X)
    model = loaded.watch(0.05, sentinel=False)
    try:
        assert (served(model), torch.equal(model(X), expected)) == ("1", True)
        store.promote("mlp:2", "prod")
        wait_until(lambda: served(model) == "2", "version 2 serves")
        store.promote("mlp:3", "prod")
        wait_until(lambda: bool(model.problem), "version 3 fails its canary")
        with pytest.raises(IncompatibleError):
            WatchedModel("mlp:3", loaded_options(store), sentinel=False).check()
        assert (served(model), torch.equal(model(X), expected)) == ("2", True)
        store.promote("mlp:1", "prod")
        wait_until(lambda: served(model) == "1", "version 1 serves again")
        assert model.problem == ""
    finally:
        model.close()


def loaded_options(store: Store) -> freezer.LoadOptions:
    return freezer.LoadOptions(store=store.uri, device_class=HERE)


def test_a_key_loads_the_canary(store: Store, scripted: Frozen, tmp_path: Path) -> None:
    publish(store, with_golden(scripted.artifact, tmp_path / "second", error=0.0))
    store.promote("mlp:1", "prod")
    store.promote("mlp:2", "prod-canary", share=0.5)

    def version(key: str | None) -> int:
        loaded = freezer.load("mlp:prod", store=store.uri, device_class=HERE, key=key)
        watched = loaded.watch(60.0, sentinel=False)
        watched.close()
        return int(served(watched))

    by_key = {key: version(key) for key in ("a", "b", "c", "d", "e", "f")}
    assert by_key == {key: store.version("mlp:prod", key).number for key in by_key}
    assert set(by_key.values()) == {1, 2}
    assert version(None) == 1


def test_folders_cannot_be_watched(scripted: Frozen) -> None:
    with pytest.raises(UsageError):
        freezer.load(scripted.artifact.folder).watch()


def called(model: WatchedModel, until: Callable[[Sentinel], bool]) -> Sentinel:
    """Call a model until its sentinel has seen something; at most NUM_CALLS times."""
    assert model.loaded is not None
    sentinel = model.loaded.sentinel
    assert sentinel is not None
    wait_until(lambda: sentinel.is_ready, "the portable program is loaded")
    before = sentinel.num_calls
    while not until(sentinel):
        assert sentinel.num_calls - before < NUM_CALLS, vars(sentinel)
        assert not sentinel.problem
        model(X)
        time.sleep(0.002)  # as if a call took this long
    return sentinel


@pytest.fixture
def model(store: Store) -> Any:
    watched = freezer.load("mlp", store=store.uri, device_class=HERE, threads=1).watch(60.0)
    yield watched
    watched.close()


def frozen_tensors(payload: Any) -> list[torch.Tensor]:
    """The weights of a TorchScript payload, in its memory."""
    return [
        node.t("value")
        for node in payload.run.graph.findAllNodes("prim::Constant")
        if node.hasAttribute("value") and node.kindOf("value") == "t"
    ]


def test_good_answers_are_within_bounds(model: Any) -> None:
    sentinel = called(model, lambda seen: seen.num_checks >= 3)
    assert sentinel.error_ratio <= 1
    elapsed_s = time.perf_counter() - sentinel.since
    assert sentinel.cpu_s <= BUDGET * elapsed_s + sentinel.cpu_s / sentinel.num_checks


EXITING = """
import sys, time
import torch
import freezer
from freezer.serving import sentinel
from tests.support.services import X
from tests.support.steps import HERE, artifact_of, python, quickly, random_inputs

def slow(expected, outputs):
    begun.append(1)
    torch.ones(4000, 4000) @ torch.ones(4000, 4000)
    return [0.0] * len(outputs)

begun = []
sentinel._errors = slow
freezer.load("mlp", store=sys.argv[1], device_class=HERE, threads=1).watch(60.0)
while not begun:
    time.sleep(0.01)
"""
"""Exits while its sentinel computes."""


def test_a_process_exits_while_its_sentinel_computes(store: Store) -> None:
    done = finished(sys.executable, "-c", EXITING, store.uri, cwd=ROOT)
    assert done.returncode == 0, done.stderr


LOADING = """
import sys, threading, time
from freezer.serving import following
from freezer.serving.process import LoadOptions

def slow(self):
    begun.set()
    time.sleep(1)
    print("loaded", flush=True)

begun = threading.Event()
following.WatchedModel._check = slow
following.WatchedModel("mlp", LoadOptions(store=sys.argv[1])).start(0.01)
begun.wait()
"""


def test_a_process_exits_after_its_load(store: Store) -> None:
    """Which may be within an engine's code."""
    done = finished(sys.executable, "-c", LOADING, store.uri, cwd=ROOT)
    assert "loaded" in done.stdout


def test_a_corrupted_weight_is_seen(model: Any) -> None:
    called(model, lambda seen: seen.num_checks >= 1)
    (weight, *_) = [t for t in frozen_tensors(model.loaded.model._payloads[0]) if t.dim() == 2]
    with torch.no_grad():
        weight[0, 0] += 1.0
    assert called(model, lambda seen: seen.error_ratio > 1).error_ratio > 1


def test_wrong_answers_are_seen(model: Any) -> None:
    called(model, lambda seen: seen.num_checks >= 1)
    opened = model.loaded.model._payloads[0]
    run = opened.run
    object.__setattr__(opened, "run", lambda *tensors: [run(*tensors)[0] * float("nan")])
    assert called(model, lambda seen: seen.error_ratio > 1).error_ratio == float("inf")


def test_slow_calls_are_seen(model: Any) -> None:
    """The tests beside this one may be what makes calls slow before."""
    before = called(model, lambda seen: not math.isnan(seen.speed_ratio)).speed_ratio
    opened = model.loaded.model._payloads[0]
    run = opened.run

    def slowed(*tensors: torch.Tensor) -> Any:
        time.sleep(0.02)
        return run(*tensors)

    object.__setattr__(opened, "run", slowed)
    least = min(SLOW, before / 2)
    assert called(model, lambda seen: seen.speed_ratio < least).speed_ratio < SLOW


LIMITED = """
import os, sys, torch
x = torch.randn(2, 16, 28, 28)
torch.nn.functional.conv2d(x, x[:, :, :3, :3])
del os.environ["ONEDNN_MAX_CPU_ISA"]  # oneDNN has read it
import freezer
model = freezer.load("conv", store=sys.argv[1], device_class=sys.argv[2]).watch(60.0)
sentinel = model.loaded.sentinel
while sentinel.num_calls < 1000 and not sentinel.speed_ratio < 0.5:
    model(x)
print(sentinel.speed_ratio)
model.close()
"""


@pytest.mark.slow
def test_lesser_instructions_are_seen(tmp_path: Path) -> None:
    """A limit that the environment does not show; `load` refuses one that it does."""
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    store, artifacts = Store.open(str(tmp_path / "store"), create=True), []
    for recipe, name in (("torchscript-frozen", HERE), ("portable", "portable")):
        given = {"input": random_inputs(2, 16, 28, 28)}
        result = quickly(model, given, tmp_path / recipe, recipe, name="conv", device_class=name)
        artifacts.append(artifact_of(result))
    store.publish("conv", source_key="key", artifacts=artifacts)
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "SSE41"}
    assert float(python(LIMITED, store.uri, HERE, env=limited)) < SLOW


def test_without_a_portable_artifact_nothing_is_checked(scripted: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path), create=True)
    store.publish("mlp", source_key="key", artifacts=[scripted.artifact])
    watched = freezer.load("mlp", store=store.uri, device_class=HERE).watch(60.0)
    wait_until(lambda: bool(watched.loaded.sentinel.problem), "it gives up")
    assert watched(X).shape == (2, 3)
    watched.close()
