"""Artifacts for several thread counts and points: what is built, how it is judged, and what
serves.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import freezer
from freezer.artifact import frozen_code
from freezer.cli.app import main
from freezer.errors import ContractError, IncompatibleError, UsageError
from freezer.freezing.judging import judge
from freezer.freezing.judging.judgement import general
from freezer.freezing.target import target_here
from freezer.pyfunc import _load_pyfunc
from freezer.serving.canary import canary_figures
from freezer.spec import Dim
from tests.conftest import Several
from tests.support.models import mlp
from tests.support.steps import (
    BATCH,
    HERE,
    candidate_of,
    copy_of,
    judgement_of,
    random_inputs,
    session_of,
    subject_of,
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


@pytest.mark.slow
def test_payload_for_each_thread_count_and_shape(several: Several) -> None:
    payloads = several.candidate.payloads
    assert [payload.path for payload in payloads] == PATHS, (
        "the deciding count first, and the most special shape first"
    )
    assert [payload.num_threads for payload in payloads] == [2, 2, 2, 1, 1, 1]
    assert [(payload.dims[0].min, payload.dims[0].max) for payload in payloads] == [
        (1, 1),
        (3, 3),
        (1, 4),
    ] * 2
    reports = several.candidate.reports
    assert set(reports) == set(PATHS)
    assert all("capture" in reports[path].phases_s for path in PATHS)
    code = frozen_code(several.artifact)
    parts = dict(zip(PATHS, code.split("# payloads/")[1:], strict=True))
    assert all("num_threads(2)" in parts[path] for path in PATHS[:3])
    assert not any("omp parallel" in parts[path] for path in PATHS[3:])


def test_thread_counts_are_checked() -> None:
    assert target_here(HERE, (1, 4)).thread_counts == (1, 4)
    assert target_here("portable", (4, 1)).thread_counts == (4,), "it fits any"
    for counts in ((), (0,), (2, 1, 2)):
        with pytest.raises(UsageError, match=r"expected one or more of at least 1, without"):
            target_here(HERE, counts)


def test_every_point_has_an_input_set() -> None:
    axes = {"x": {0: Dim(name="batch", min=1, max=64)}}
    plain = subject_of(mlp(), {"x": random_inputs(2, 4)}, axes)
    assert plain.points == ({"batch": 1},)
    every = [{"batch": size} for size in (1, 2, 3, 5, 64)]
    subject = subject_of(mlp(), {"x": random_inputs(2, 4)}, axes, points=every)
    assert subject.points == tuple(every)
    assert {item.point["batch"] for item in subject.sets} > {1, 2, 3, 5, 64}
    assert len(plain.sets) < len(subject.sets)


@pytest.mark.slow
def test_every_payload_is_judged_and_timed(several: Several) -> None:
    drift, cells, winner = (
        several.judgement.trials[0].drift,
        several.judgement.cells,
        several.judgement.winner,
    )
    assert drift is not None
    runs = {(row.num_threads, row.payload) for row in drift.rows}
    assert runs == {(payload.num_threads, payload.path) for payload in several.candidate.payloads}
    by_dynamic = {
        several.subject.sets[row.set_index].point["batch"]
        for row in drift.rows
        if row.payload == PATHS[2]
    }
    assert by_dynamic >= {
        1,
        3,
    }, "the payload that would serve a point without its own is judged there too"
    timed = [(cell.num_threads, cell.point["batch"]) for cell in cells]
    assert timed == [
        (2, 1),
        (2, 3),
        (2, 2),
        (2, 4),
        (1, 1),
        (1, 3),
    ], "the middle and the largest sizes with the first count"
    for cell in (*cells[:2], *cells[4:]):
        assert set(cell.sampling.samples_ms) == {
            "eager",
            "inductor-frozen",
            general("inductor-frozen"),
        }
        name = f"{SUFFIXES[cell.num_threads]}.pt2"
        assert list(cell.payloads.values()) == [
            f"payloads/batch{cell.point['batch']}{name}",
            f"payloads/all{name}",
        ]
    assert winner is not None
    kept = [payload.path for payload in winner.candidate.payloads]
    assert sorted([*kept, *(item.payload for item in winner.dropped)]) == sorted(PATHS)
    assert {PATHS[0], PATHS[2]} <= set(kept), "the deciding payload and the one for all sizes"
    assert {figures.payload for figures in winner.points} <= set(kept)


def test_wrong_payload_for_another_count_is_rejected(tmp_path: Path) -> None:
    """A payload of a model with another bias replaces the one of a further thread count."""
    other = subject_of(mlp(), {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})
    right = candidate_of(other, "torchscript-frozen", tmp_path / "right")
    changed = mlp()
    changed.last.bias.data += 1.0  # type: ignore[operator,union-attr]
    wrong = candidate_of(
        subject_of(changed, {"x": random_inputs(2, 4)}, {"x": {0: BATCH}}),
        "torchscript-frozen",
        tmp_path / "wrong",
    )
    (right.folder / "payloads" / "wrong.pt").write_bytes(
        (wrong.folder / wrong.payloads[0].path).read_bytes()
    )
    (payload,) = right.payloads
    payloads = (
        replace(payload, num_threads=THREADS),
        replace(payload, path="payloads/wrong.pt", num_threads=THREADS + 1),
    )
    found = judgement_of(other, [replace(right, payloads=payloads)])
    assert found.verdict == "published", "the other count is not requested"
    session = session_of(other, target_here(HERE, (THREADS, THREADS + 1)))
    found = judge(session, [replace(right, payloads=payloads)])
    assert found.verdict == "rejected"
    assert f"payloads/wrong.pt with {THREADS + 1} threads" in found.reason


@pytest.mark.slow
def test_manifest_and_evidence_have_every_cell(several: Several) -> None:
    manifest = several.artifact.manifest
    assert manifest.latency is not None
    rows = manifest.latency.points
    assert {(row.num_threads, row.point["batch"]) for row in rows} == {
        (2, 1),
        (2, 3),
        (1, 1),
        (1, 3),
        (2, 2),
        (2, 4),
    }
    assert (manifest.latency.num_threads, manifest.latency.point) == (2, {"batch": 1})
    assert rows[0].speedup_ci == manifest.latency.speedup_ci
    latency = pq.read_table(several.artifact.folder / "evidence/latency.parquet").to_pylist()
    timed = {(row.num_threads, f"batch={row.point['batch']}") for row in rows}
    assert {(row["threads"], row["point"]) for row in latency} == timed
    assert {row["payload"] for row in latency} == {None, *PATHS}
    drift = pq.read_table(several.artifact.folder / "evidence/drift.parquet").to_pylist()
    assert {row["payload"] for row in drift} == set(PATHS)
    assert {golden.point["batch"] for golden in manifest.golden} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_payloads_for_the_exact_thread_count_serve(
    several: Several, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "coldpress"):
        model = freezer.load(several.artifact.folder, threads=count)
    assert not any(
        "threads, as no payload is made" in record.getMessage() for record in caplog.records
    )
    assert [model.payload_for({"batch": size}).path for size in (1, 2, 3, 4)] == [
        f"payloads/{name}{SUFFIXES[count]}.pt2" for name in ("batch1", "all", "batch3", "all")
    ]
    for batch in (1, 2, 3, 4):
        x = random_inputs(batch, 3, 16, 16, seed=batch)
        torch.testing.assert_close(model(x), several.model(x).detach())


@pytest.mark.slow
def test_largest_smaller_count_serves(several: Several, tmp_path: Path) -> None:
    model = freezer.load(several.artifact.folder, threads=5)
    assert model.payload_for({"batch": 1}).num_threads == 2
    two = tuple(
        payload for payload in several.artifact.manifest.payloads if payload.num_threads == 2
    )
    with pytest.raises(IncompatibleError, match=r"threads_mismatch: got 1 thread.*expected 2"):
        freezer.load(copy_of(several.artifact, tmp_path / "two", payloads=two).folder, threads=1)
    with pytest.raises(UsageError, match="got threads=0, expected at least 1"):
        freezer.load(several.artifact.folder, threads=0)
    with pytest.raises(UsageError, match="got threads=0, expected at least 1"):
        freezer.verify(several.artifact.folder, threads=0)


LOAD = """
import sys, torch, freezer
torch.set_num_threads(int(sys.argv[2]))
model = freezer.load(sys.argv[1])
print(model.payload_for({"batch": 1}).num_threads, torch.get_num_threads())
"""


@pytest.mark.slow
def test_payload_for_another_thread_count(several: Several) -> None:
    model = freezer.load(several.artifact.folder, threads=1)
    with pytest.raises(
        ContractError,
        match=r"no payload serves {'batch': 9}; the artifact holds payloads/batch1-threads1.pt2",
    ):
        model.payload_for({"batch": 9})
    with pytest.raises(ContractError, match=r"got sizes of \['rows'\], expected those of batch"):
        model.payload_for({"rows": 1})


@pytest.mark.slow
def test_canary_runs_the_serving_payloads(several: Several, tmp_path: Path) -> None:
    one = freezer.load(several.artifact.folder, threads=1)
    assert all(figure.problem is None for figure in canary_figures(several.artifact, one))
    broken = copy_of(several.artifact, tmp_path / "broken")
    (broken.folder / PATHS[4]).write_bytes(b"not a package")
    assert freezer.load(broken.folder, threads=2).payload_for({"batch": 3}).path == PATHS[1], (
        "the others are not looked at"
    )
    with pytest.raises(IncompatibleError, match="tampered"):
        freezer.load(broken.folder, threads=1)


@pytest.mark.slow
def test_verify_and_mlflow_take_the_thread_count(several: Several) -> None:
    assert freezer.verify(several.artifact.folder, threads=1).num_files == len(
        several.artifact.manifest.contents
    )
    model = _load_pyfunc(str(several.artifact.folder), {"threads": 1}).get_raw_model()
    assert model.payload_for({"batch": 1}).num_threads == 1


@pytest.mark.slow
def test_command_takes_thread_counts_and_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = [
        "freeze",
        "python:tests.support.models:mlp",
        "--out",
        str(out),
        "--inputs",
        '{"x": {"shape": ["batch", 4]}}',
    ]
    arguments += [
        "--dims",
        '{"batch": {"max": 4}}',
        "--recipe",
        "torchscript-frozen",
        "--device-class",
        "portable",
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "coldpress",
            *arguments,
            "--threads",
            "1",
            "--threads",
            "2",
            "--point",
            "batch=3",
            "--point",
            "batch=1",
        ],
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    latency = freezer.load(out).manifest.latency  # type: ignore[union-attr]
    assert latency is not None
    assert [(row.num_threads, row.point["batch"]) for row in latency.points] == [
        (1, 3),
        (1, 1),
        (1, 2),
        (1, 4),
    ]
    assert latency.point == {"batch": 3}
    for wrong in ("batch", "batch=x", "batch=1,batch=2"):
        monkeypatch.setattr(sys, "argv", ["coldpress", *arguments, "--point", wrong])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2


def test_points_must_be_within_the_dims(tmp_path: Path) -> None:
    dims = {"x": {0: Dim(name="batch", min=1, max=4)}}
    with pytest.raises(
        freezer.ColdpressError, match=r"point {'batch': 9}: expected batch from 1 to 4"
    ):
        freezer.freeze(
            mlp(),
            {"x": random_inputs(2, 4)},
            out=tmp_path / "out",
            dims=dims,
            options=freezer.FreezeOptions(points=[{"batch": 9}]),
        )
