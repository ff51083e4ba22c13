"""Artifacts for several thread counts and points: what is built, how it is judged, and what
serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import freezer
from freezer.artifact import Artifact
from freezer.cli.app import app
from freezer.errors import IncompatibleError, UsageError
from freezer.freezing.target import target_here
from freezer.serving.canary import run_canary
from tests.conftest import Several
from tests.support.commands import invoked
from tests.support.steps import (
    HERE,
    copy_of,
    random_inputs,
)

SUFFIXES = {2: "", 1: "-threads1"}
PATHS = [
    f"payloads/{name}{suffix}.pt2"
    for suffix in SUFFIXES.values()
    for name in ("batch1", "batch3", "all")
]
THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def count_stays() -> Iterator[None]:
    """No test changes the process's thread count."""
    yield
    assert torch.get_num_threads() == THREADS


def test_thread_counts_are_checked() -> None:
    assert target_here(HERE, (1, 4)).thread_counts == (1, 4)
    assert target_here("portable", (4, 1)).thread_counts == (4,), "it fits any"
    for counts in ((), (0,), (2, 1, 2)):
        with pytest.raises(UsageError, match=r"expected one or more of at least 1, without"):
            target_here(HERE, counts)


@pytest.mark.slow
def test_manifest_and_evidence_have_every_cell(several: Several) -> None:
    manifest: Any = several.artifact.manifest
    rows = manifest.latency.points
    places = {(row.num_threads, row.point["batch"]) for row in rows}
    assert places == {(2, 1), (2, 3), (1, 1), (1, 3), (2, 2), (2, 4)}
    assert rows[0].speedup_ci == manifest.latency.speedup_ci
    for name, expected in (("latency", {None, *PATHS}), ("drift", {*PATHS})):
        table = pq.read_table(several.artifact.folder / f"evidence/{name}.parquet")
        assert {row["payload"] for row in table.to_pylist()} == expected
    assert {golden.point["batch"] for golden in manifest.golden} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_payloads_for_the_exact_thread_count_serve(several: Several, count: int) -> None:
    model = freezer.load(several.artifact.folder, threads=count)
    for batch, name in enumerate(("batch1", "all", "batch3", "all"), 1):
        path = f"payloads/{name}{SUFFIXES[count]}.pt2"
        assert model.payload_for({"batch": batch}).path == path
        x = random_inputs(batch, 3, 16, 16, seed=batch)
        torch.testing.assert_close(model(x), several.model(x).detach())


@pytest.mark.slow
def test_canary_runs_the_serving_payloads(several: Several, tmp_path: Path) -> None:
    run_canary(several.artifact, freezer.load(several.artifact.folder, threads=1))
    broken = copy_of(several.artifact, tmp_path / "broken")
    (broken.folder / PATHS[4]).write_bytes(b"not a package")
    assert freezer.load(broken.folder, threads=2).payload_for({"batch": 3}).path == PATHS[1], (
        "the others are not looked at"
    )
    with pytest.raises(IncompatibleError, match="tampered"):
        freezer.load(broken.folder, threads=1)


@pytest.mark.slow
def test_command_takes_thread_counts_and_points(tmp_path: Path) -> None:
    inputs = ("--inputs", '{"x": {"shape": ["batch", 4]}}', "--dims", '{"batch": {"max": 4}}')
    recipe = ("--recipe", "torchscript-frozen", "--device-class", "portable")
    given = ("--threads", "1", "--threads", "2", "--point", "batch=3", "--point", "batch=1")
    command = ("freeze", "python:tests.support.models:mlp", "--out", str(tmp_path / "out"))
    done = invoked(app, *command, *inputs, *recipe, *given)
    assert done.exit_code == 0, done.output
    latency: Any = Artifact.read(tmp_path / "out").manifest.latency
    assert latency.point == {"batch": 3}
    assert {row.num_threads for row in latency.points} == {1}
    named, sampled = [3, 1], [2, 4]  # what is slower at the named ones is not timed further
    assert [row.point["batch"] for row in latency.points] in (named, named + sampled)
