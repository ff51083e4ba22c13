"""Tracking, against a real sqlite MLflow: one database for the module, a campaign and models of its own for every test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from torch import nn

from freezer.artifact import Artifact
from freezer.errors import ContractError, InfrastructureError, IntegrityError, UsageError
from freezer.freeze import freeze
from freezer.limits import SamplingPolicy
from freezer.report import Change
from freezer.report import Report as FreezingReport
from freezer.report_markdown import manifest_markdown
from freezer.spec import Dim
from freezer.store import Store
from pipeline.outcome import CandidateReport, Outcome
from pipeline.tracking import figures
from pipeline.tracking.connection import resolve
from pipeline.tracking.projection import Projection
from pipeline.tracking.records import run_records, summary_markdown, summary_table
from pipeline.tracking.registry import alias, register

DIGEST = "sha256:" + 64 * "a"
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="module")
def artifact(source: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A real portable artifact, batch 1 to 8."""
    result = freeze(
        source,
        {"input": torch.from_numpy(X)},
        out=tmp_path_factory.mktemp("artifact"),
        name="tiny",
        device_class="portable",
        dims={"input": {0: Dim(name="batch", min=1, max=8)}},
        policy=SamplingPolicy(time_limit_s=0.3, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0),
    )
    assert result.artifact is not None, result.reason
    return result.artifact


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    mlflow.set_tracking_uri(before)


@pytest.fixture
def projection(uri: str, request: pytest.FixtureRequest) -> Projection:
    """Of a campaign that is named as the test."""
    opened = Projection.open(uri, request.node.name)
    opened.start("catalog.yaml", 1_700_000_000.0)
    return opened


def candidate(recipe: str, **changes: Any) -> CandidateReport:
    made = CandidateReport(
        recipe=recipe,
        build_key=f"key-of-{recipe}",
        capture="export",
        build_s=2.5,
        size_bytes=1_500_000,
        num_payloads=1,
        drift={"error_ratio": 1.25, "max_abs_err": 1e-6, "sqnr_db": 120.0, "margin": 2.4},
        latency_ms={"p50": 1.0, "p90": 1.2, "p99": None},
        speedup=2.0,
        speedup_ci=(1.8, 2.2),
    )
    return replace(made, **changes)


def outcome(model: str, **changes: Any) -> Outcome:
    made = Outcome(
        model=model,
        device_class="portable",
        verdict="published",
        reason="judged on drift alone",
        num_threads=2,
        source="python:examples:tiny",
        source_key="a-source",
        judge_key="a-judge",
        recipe="portable",
        speedup=2.0,
        speedup_ci=(1.8, 2.2),
        drift={"error_ratio": 1.25, "max_abs_err": 1e-6, "sqnr_db": 120.0, "margin": 2.4},
        latency_ms={"eager_p50": 2.0, "p50": 1.0, "p90": 1.2, "p99": None},
        artifact=DIGEST,
        version=3,
        build_s=2.5,
        judge_s=4.0,
        candidates=(candidate("portable"), candidate("torchscript-frozen", problem="error_ratio 41.2 > 3", speedup=None)),
    )
    return replace(made, **changes)


def failed(model: str, **changes: Any) -> Outcome:
    return outcome(
        model,
        **{"verdict": "failed", "failure": "source", "artifact": None, "candidates": (), "log_tail": "Traceback: gone", **changes},
    )


def runs_of(projection: Projection, kind: str = "candidate") -> list[Run]:
    wanted = f"tags.`coldpress.campaign` = '{projection.campaign}' AND tags.`coldpress.kind` = '{kind}'"
    return list(projection.client.search_runs([projection.experiment_id], wanted))


def by_recipe(projection: Projection) -> dict[str, Run]:
    return {run.data.tags["coldpress.recipe"]: run for run in runs_of(projection)}


def text_of(projection: Projection, run_id: str, path: str) -> str:
    return Path(projection.client.download_artifacts(run_id, path)).read_text()


# Runs


def test_a_candidate_is_a_run_with_tags_params_and_grouped_metrics(projection: Projection, artifact: Artifact) -> None:
    run_id = projection.log_outcome(outcome("runs"), artifact.manifest)
    runs = by_recipe(projection)
    assert set(runs) == {"portable", "torchscript-frozen"}
    winner = runs["portable"]
    assert winner.info.run_id == run_id
    assert winner.info.run_name == "runs · portable · portable"
    assert winner.info.status == "FINISHED"
    assert winner.info.end_time - winner.info.start_time == 2500
    assert winner.data.params == {
        "model": "runs",
        "device_class": "portable",
        "source": "python:examples:tiny",
        "num_threads": "2",
        "recipe": "portable",
        "capture": "export",
    }
    assert winner.data.metrics == {
        "drift/error_ratio": 1.25,
        "drift/max_abs_err": 1e-6,
        "drift/sqnr_db": 120.0,
        "drift/margin": 2.4,
        "latency_ms/p50": 1.0,
        "latency_ms/p90": 1.2,
        "latency_ms/eager_p50": 2.0,
        "speedup/value": 2.0,
        "speedup/ci_low": 1.8,
        "speedup/ci_high": 2.2,
        "size_mb/payloads": 1.5,
        "build_s/total": 2.5,
    }
    parent = runs_of(projection, "campaign")[0]
    expected = {
        "mlflow.parentRunId": parent.info.run_id,
        "coldpress.campaign": projection.campaign,
        "coldpress.kind": "candidate",
        "coldpress.model": "runs",
        "coldpress.device_class": "portable",
        "coldpress.recipe": "portable",
        "coldpress.verdict": "published",
        "coldpress.winner": "true",
        "coldpress.build_key": "key-of-portable",
        "coldpress.judge_key": "a-judge",
        "coldpress.source_key": "a-source",
        "coldpress.artifact": DIGEST,
        "coldpress.version": "3",
    }
    assert expected.items() <= winner.data.tags.items()
    assert "coldpress.problem" not in winner.data.tags


def test_the_winners_run_alone_holds_the_manifest(projection: Projection, artifact: Artifact) -> None:
    projection.log_outcome(outcome("manifest"), artifact.manifest)
    runs = by_recipe(projection)
    assert json.loads(text_of(projection, runs["portable"].info.run_id, "manifest.json"))["model"] == "tiny"
    assert not projection.client.list_artifacts(runs["torchscript-frozen"].info.run_id)
    assert runs["torchscript-frozen"].data.tags["coldpress.problem"] == "error_ratio 41.2 > 3"
    assert runs["torchscript-frozen"].data.tags["coldpress.winner"] == "false"


def test_every_candidates_run_holds_a_page_of_what_freezing_did(projection: Projection) -> None:
    report = FreezingReport(ops_before={"aten::dropout": 2}, changes=(Change(name="dropouts removed", count=2),)).to_json()
    made = [candidate("portable", reports={"payloads/all.pt2": report}, strides_equal=True)]
    made.append(candidate("torchscript-frozen", reports={"payloads/all.pt": report}, problem="error_ratio 41.2 > 3"))
    projection.log_outcome(outcome("page", candidates=tuple(made)))
    pages = {recipe: text_of(projection, run.info.run_id, "freezing.md") for recipe, run in by_recipe(projection).items()}
    head = "# What freezing did: page for portable, {}\n\n{}\n"
    assert pages["portable"].startswith(head.format("portable", "Passes: speedup 2.00 over eager, error ratio 1.25"))
    assert "Strides of all outputs equal to eager's." in pages["portable"]
    assert pages["torchscript-frozen"].startswith(head.format("torchscript-frozen", "Does not pass: error_ratio 41.2 > 3"))
    assert all("| dropouts removed | 2 |" in page for page in pages.values())


def test_a_failed_candidate_is_a_failed_run_with_its_problem_and_the_log(projection: Projection) -> None:
    broken = candidate("inductor-frozen", problem="x" * 5000, failure="build", drift=None, latency_ms=None, num_payloads=0)
    projection.log_outcome(outcome("broken", candidates=(candidate("portable"), broken), log_tail="g++: fatal error"))
    runs = by_recipe(projection)
    run = runs["inductor-frozen"]
    assert run.info.status == "FAILED"
    assert run.data.tags["coldpress.failure"] == "build"
    assert run.data.tags["coldpress.problem"].startswith("xxx")
    assert len(run.data.tags["coldpress.problem"]) == 1000
    assert text_of(projection, run.info.run_id, "log.txt") == "g++: fatal error"
    assert runs["portable"].info.status == "FINISHED"


def test_an_outcome_without_candidates_is_one_failed_run(projection: Projection) -> None:
    assert projection.log_outcome(failed("gone", reason="no such file: gone.pt")) is None
    (run,) = runs_of(projection)
    assert run.info.run_name == "gone · portable · failed: source"
    assert run.info.status == "FAILED"
    assert run.data.tags["coldpress.problem"] == "no such file: gone.pt"
    assert text_of(projection, run.info.run_id, "log.txt") == "Traceback: gone"


def test_infinite_and_missing_figures_are_logged_as_far_as_there_are_any(projection: Projection) -> None:
    drift = {"error_ratio": float("inf"), "max_abs_err": None, "margin": 0.0}
    projection.log_outcome(outcome("infinite", candidates=(candidate("portable", drift=drift, problem="not finite"),)))
    metrics = by_recipe(projection)["portable"].data.metrics
    assert metrics["drift/error_ratio"] > 1e300
    assert "drift/max_abs_err" not in metrics


# Idempotence


def test_logging_twice_changes_nothing(projection: Projection, artifact: Artifact) -> None:
    both = [outcome("twice"), failed("twice-gone")]
    first = [projection.log_outcome(item, artifact.manifest) for item in both]
    before = {run.info.run_id: run.to_dictionary() for run in runs_of(projection)}
    assert [projection.log_outcome(item, artifact.manifest) for item in both] == first
    resumed = Projection.open(projection.tracking_uri, projection.campaign)
    assert resumed.start("catalog.yaml", 1_800_000_000.0) == projection.start("catalog.yaml", 1_700_000_000.0)
    # A resumed campaign takes its own outcomes from the ledger, as cached ones.
    assert [resumed.log_outcome(item.as_cached(), artifact.manifest) for item in both] == first
    assert {run.info.run_id: run.to_dictionary() for run in runs_of(projection)} == before
    assert len(before) == 3
    (parent,) = runs_of(projection, "campaign")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs_of(projection)} == {parent.info.run_id}


def test_a_run_that_broke_off_is_completed(projection: Projection, artifact: Artifact) -> None:
    (record, *_) = run_records(outcome("broke-off"), projection.campaign, artifact.manifest)
    parent = runs_of(projection, "campaign")[0].info.run_id
    run = projection.client.create_run(
        projection.experiment_id, start_time=123, tags={**record.tags, "mlflow.parentRunId": parent}, run_name=record.name
    )
    projection.client.log_metric(run.info.run_id, "drift/error_ratio", 1.25, timestamp=123)
    resumed = Projection.open(projection.tracking_uri, projection.campaign)
    resumed.start("catalog.yaml", 0.0)
    assert resumed.log_outcome(outcome("broke-off"), artifact.manifest) == run.info.run_id
    completed = by_recipe(projection)["portable"]
    assert completed.info.status == "FINISHED"
    assert completed.data.metrics["speedup/value"] == 2.0
    assert len(projection.client.get_metric_history(run.info.run_id, "drift/error_ratio")) == 1
    assert json.loads(text_of(projection, run.info.run_id, "manifest.json"))["model"] == "tiny"


def test_a_changed_outcome_replaces_its_runs(projection: Projection) -> None:
    projection.log_outcome(failed("changed", failure="timeout"))
    projection.log_outcome(outcome("changed", candidates=(candidate("portable", speedup=3.0),)))
    projection.log_outcome(outcome("changed", candidates=(candidate("portable", speedup=1.5, capture="trace"),)))
    (run,) = runs_of(projection)
    assert run.data.tags["coldpress.recipe"] == "portable"
    assert run.data.metrics["speedup/value"] == 1.5
    assert run.data.params["capture"] == "trace"


def test_campaigns_do_not_mix(uri: str, projection: Projection) -> None:
    other = Projection.open(uri, "it's another")
    other.start("catalog.yaml", 0.0)
    assert other.log_outcome(outcome("mix")) != projection.log_outcome(outcome("mix"))
    again = Projection.open(uri, "it's another")
    assert again.start("catalog.yaml", 0.0) == other.start("catalog.yaml", 0.0)
    assert again.log_outcome(outcome("mix")) == other.log_outcome(outcome("mix"))


def test_runs_that_a_dying_server_made_twice_are_one_again(projection: Projection, artifact: Artifact) -> None:
    kept = projection.log_outcome(outcome("doubled"), artifact.manifest)
    (record, *_) = run_records(outcome("doubled"), projection.campaign, artifact.manifest)
    for kind_tags in (record.tags, {"coldpress.campaign": projection.campaign, "coldpress.kind": "campaign"}):
        projection.client.create_run(projection.experiment_id, start_time=123, tags=dict(kind_tags))
    resumed = Projection.open(projection.tracking_uri, projection.campaign)
    resumed.start("catalog.yaml", 0.0)
    assert resumed.log_outcome(outcome("doubled"), artifact.manifest) == kept
    assert len(runs_of(projection)) == 2
    assert len(runs_of(projection, "campaign")) == 1


def test_runs_bear_the_time_that_their_outcome_was_reached(projection: Projection) -> None:
    run_id = projection.log_outcome(outcome("timed"), reached=1_700_000_010.0)
    run = projection.client.get_run(str(run_id))
    assert (run.info.start_time, run.info.end_time) == (1_700_000_007_500, 1_700_000_010_000)


# The summary


def test_finish_writes_table_figures_and_counts(projection: Projection) -> None:
    outcomes = [outcome("one"), failed("two", reason="a | b"), outcome("three", drift={"error_ratio": float("inf")}).as_cached()]
    projection.finish(outcomes, 1, interrupted=False)
    projection.finish(outcomes, 1, interrupted=False)
    (parent,) = runs_of(projection, "campaign")
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["outcomes/published"] == 2
    assert parent.data.metrics["outcomes/failed"] == 1
    assert parent.data.metrics["outcomes/unchanged"] == 1
    assert parent.data.metrics["build_s/total"] == 5.0
    assert parent.data.tags["coldpress.exit_code"] == "1"
    mlflow.set_tracking_uri(projection.tracking_uri)
    table = projection.client.load_table(projection.experiment_id, "summary.json", run_ids=[parent.info.run_id])
    assert list(table["model"]) == ["one", "two", "three"]
    assert table["speedup_ci_low"][0] == 1.8
    assert "| two | portable | failed: source |" in text_of(projection, parent.info.run_id, "summary.md")
    for name in ("speedups.png", "drift.png"):
        path = Path(projection.client.download_artifacts(parent.info.run_id, name))
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
    assert len(projection.client.get_metric_history(parent.info.run_id, "outcomes/total")) == 1


@pytest.mark.parametrize(
    ("exit_code", "interrupted", "status"), [(0, False, "FINISHED"), (3, False, "FAILED"), (130, True, "KILLED")]
)
def test_the_end_of_the_parent_run(projection: Projection, exit_code: int, interrupted: bool, status: str) -> None:
    projection.finish([], exit_code, interrupted=interrupted)
    assert runs_of(projection, "campaign")[0].info.status == status


def test_a_summary_that_is_shown_already_is_left_alone(projection: Projection) -> None:
    projection.finish([outcome("one")], 0, interrupted=False, finished=1_700_000_100.0)
    before = runs_of(projection, "campaign")[0].to_dictionary()
    again = Projection.open(projection.tracking_uri, projection.campaign)
    again.start("catalog.yaml", 0.0, resume=False)
    again.finish([outcome("one")], 0, interrupted=False, finished=1_700_000_100.0)
    assert again.num_written == 0
    assert runs_of(projection, "campaign")[0].to_dictionary() == before
    assert before["info"]["end_time"] == 1_700_000_100_000
    again.finish([outcome("one", reason="another")], 0, interrupted=False, finished=1_700_000_100.0)
    assert again.num_written == 1


def test_an_interrupted_campaign_is_resumed_and_its_counts_follow(projection: Projection) -> None:
    projection.finish([outcome("one"), failed("two")], 130, interrupted=True)
    projection.start("catalog.yaml", 0.0)
    assert runs_of(projection, "campaign")[0].info.status == "RUNNING"
    projection.finish([outcome("one"), outcome("two")], 0, interrupted=False)
    (parent,) = runs_of(projection, "campaign")
    assert parent.data.metrics["outcomes/published"] == 2
    assert parent.data.metrics["outcomes/failed"] == 0


def test_the_summary_is_json_without_nan_and_markdown_without_broken_cells() -> None:
    odd = outcome("odd", drift={"error_ratio": float("inf"), "margin": float("nan")}, reason="a | b\nc")
    table = json.loads(summary_table([odd]), parse_constant=lambda name: pytest.fail(name))
    assert dict(zip(table["columns"], table["data"][0], strict=True))["error_ratio"] is None
    text = summary_markdown([odd], "camp", exit_code=0, interrupted=False)
    assert "a \\| b c |" in text
    assert "1 outcomes (1 published); exit code 0" in text


# Figures


def axes_of(figure: Any) -> Any:
    (axes,) = figure.axes
    return axes


def test_speedups_are_sorted_bars_with_a_line_at_one(tmp_path: Path) -> None:
    figure = figures.speedups([outcome("slow", speedup=0.5, speedup_ci=(0.4, 0.6)), outcome("fast"), failed("gone", speedup=None)])
    axes = axes_of(figure)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["fast · portable", "slow · portable"]
    assert axes.yaxis_inverted()
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(1.0, 1.0), (1.0, -0.5)]
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in axes.lines)
    figure.savefig(tmp_path / "figure.png")


def test_drift_shows_every_candidate_and_the_gate(tmp_path: Path) -> None:
    exact = candidate("torchscript-frozen", drift={"error_ratio": 0.0})
    broken = candidate("inductor-frozen", drift={"error_ratio": float("inf")}, problem="not finite")
    figure = figures.drift([outcome("all", candidates=(candidate("portable"), exact, broken, candidate("none", drift=None)))])
    axes = axes_of(figure)
    points = [(line.get_marker(), line.get_markerfacecolor()) for line in axes.lines if line.get_linestyle() == "None"]
    assert [marker for marker, _ in points] == ["o", "<", ">"]
    assert points[2][1] == "white"
    assert any(list(line.get_xdata()) == [3.0, 3.0] for line in axes.lines)
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("num_rows", [0, 1, 200, 1000])
def test_figures_of_any_number_of_rows_can_be_drawn(num_rows: int) -> None:
    outcomes = [outcome(f"model-{i}", speedup=0.5 + i / 50, speedup_ci=None) for i in range(num_rows)]
    for figure in (figures.speedups(outcomes), figures.drift(outcomes)):
        assert figure.get_size_inches()[1] < 60
        axes = axes_of(figure)
        assert len(axes.get_yticklabels()) == min(num_rows, 200) or num_rows == 0


def test_figures_leave_pyplot_alone() -> None:
    code = (
        "import sys\n"
        "from pipeline.tracking import figures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "figures.speedups([]); figures.drift([])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Reaching MLflow


def test_a_closed_port_is_told_quickly_with_the_uri_and_the_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match=rf"MLflow at {uri} failed.*--tracking-uri"):
        Projection.open(uri, "closed")
    assert time.monotonic() - started < 10


def test_a_file_that_is_no_database_is_told_quickly(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database" * 100)
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match="not a database"):
        Projection.open(f"sqlite:///{tmp_path}/mlflow.db", "damaged")
    assert time.monotonic() - started < 10


def test_a_folder_is_refused_and_passwords_stay_secret() -> None:
    with pytest.raises(UsageError, match="name sqlite:///mlflow"):
        Projection.open("./mlruns", "folder")
    with pytest.raises(InfrastructureError) as caught:
        Projection.open("postgresql+missing://me:secret@127.0.0.1:1/mlflow", "secret")
    assert "secret@" not in str(caught.value)
    assert "me:***@" in str(caught.value)


def test_a_relative_database_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("sqlite:///sub/mlflow.db") == f"sqlite:///{tmp_path}/sub/mlflow.db"
    assert resolve(f"sqlite:///{tmp_path}/mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve("http://host:5000") == "http://host:5000"


def test_a_database_whose_making_is_killed_is_made_by_the_next_start(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = "import sys; from pipeline.tracking.projection import Projection; Projection.open(sys.argv[1], 'killed')"
    maker = subprocess.Popen([sys.executable, "-c", code, uri], start_new_session=True)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".mlflow.db.*")):  # some tables are there, others not
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(maker.pid, signal.SIGKILL)
    assert maker.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    projection = Projection.open(uri, "next")
    projection.start("catalog.yaml", 1.0)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_processes_that_make_the_database_together_do_not_break_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pipeline.tracking.projection import Projection\n"
        "p = Projection.open(sys.argv[1], sys.argv[2]); p.start('c', 0.0); print(p.experiment_id)\n"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/new/mlflow.db"]
    started = [subprocess.Popen([*command, f"camp-{i}"], stdout=subprocess.PIPE, text=True) for i in range(2)]
    found = [process.communicate(timeout=120)[0].split()[-1] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert found[0] == found[1]
    assert not (tmp_path / "mlruns").exists()


def test_importing_the_projection_imports_no_mlflow() -> None:
    code = (
        "import sys\n"
        "import pipeline.tracking.projection, pipeline.tracking.registry\n"
        "assert not {'mlflow', 'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The registry


def registered(projection: Projection, item: Outcome, artifact: Artifact, **changes: Any) -> str:
    settings: dict[str, Any] = {"run_id": None, "mode": "copy", "store_uri": "store", "campaign": "first", **changes}
    return register(projection.client, projection.experiment_id, item, artifact, **settings)


def uploads(projection: Projection, digest: str) -> list[Any]:
    return list(projection.client.search_logged_models([projection.experiment_id], f"tags.`coldpress.artifact` = '{digest}'"))


def test_a_registered_artifact_loads_by_its_alias(projection: Projection, artifact: Artifact, source: nn.Module) -> None:
    item = outcome("by.alias", artifact="sha256:" + 64 * "1")
    run_id = projection.log_outcome(item, artifact.manifest)
    version = registered(projection, item, artifact, run_id=run_id)
    found = projection.client.get_model_version_by_alias("by.alias", "portable")
    assert (found.version, found.run_id) == (int(version), run_id)
    expected = {"coldpress.artifact": item.artifact, "coldpress.version": "3", "coldpress.device_class": "portable"}
    assert expected.items() <= found.tags.items()
    assert found.tags["coldpress.store"] == str(Path("store").absolute())
    model = mlflow.pyfunc.load_model("models:/by.alias@portable")
    answer = model.predict({"input": X})
    np.testing.assert_allclose(answer, source(torch.from_numpy(X)).detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.predict(X), answer)
    assert model.get_raw_model().manifest.version == 3
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 4)
    with pytest.raises(ContractError, match="batch"):
        model.predict({"input": np.zeros((9, 4), np.float32)})


def test_the_whole_artifact_is_registered_and_verified(projection: Projection, artifact: Artifact) -> None:
    item = outcome("whole", artifact="sha256:" + 64 * "2")
    registered(projection, item, artifact)
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://"))
    copied = Artifact.read(folder / "artifact")
    copied.verify()
    assert copied.manifest == replace(artifact.manifest, version=3)
    assert (folder / "requirements.txt").read_text().splitlines()[:3] == [
        "coldpress",
        f"torch>={artifact.manifest.needs['torch']}",
        "safetensors",
    ]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert (folder / "artifact" / "evidence" / "all-captured-code.txt").is_file()
    assert (folder / "freezing.md").read_text() == manifest_markdown(copied.manifest)


def test_registering_twice_makes_one_version(projection: Projection, artifact: Artifact) -> None:
    item = outcome("once", artifact="sha256:" + 64 * "3")
    first = registered(projection, item, artifact)
    projection.client.delete_registered_model_alias("once", "portable")
    assert registered(projection, item, artifact) == first
    assert projection.client.get_model_version_by_alias("once", "portable").version == int(first)
    assert len(projection.client.search_model_versions("name = 'once'")) == 1
    assert len(uploads(projection, str(item.artifact))) == 1
    second = registered(projection, replace(item, artifact="sha256:" + 64 * "4", version=4), artifact)
    assert second != first
    assert projection.client.get_model_version_by_alias("once", "portable").version == int(second)


def test_an_upload_that_broke_off_is_thrown_away_and_a_complete_one_used(projection: Projection, artifact: Artifact) -> None:
    item = outcome("crashed", artifact="sha256:" + 64 * "5")
    tags = {"coldpress.artifact": str(item.artifact), "coldpress.campaign": "first"}
    broken = projection.client.create_logged_model(projection.experiment_id, name="broken", tags=tags)
    registered(projection, item, artifact)
    (upload,) = uploads(projection, str(item.artifact))
    assert upload.model_id != broken.model_id
    projection.client.delete_registered_model("crashed")
    registered(projection, item, artifact)
    assert [found.model_id for found in uploads(projection, str(item.artifact))] == [upload.model_id]


def test_an_upload_of_another_campaign_is_left_alone_for_a_day(
    projection: Projection, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = outcome("under.way", artifact="sha256:" + 32 * "17")
    tags = {"coldpress.artifact": str(item.artifact), "coldpress.campaign": "another"}
    others = projection.client.create_logged_model(projection.experiment_id, name="others", tags=tags)
    registered(projection, item, artifact)
    assert others.model_id in {found.model_id for found in uploads(projection, str(item.artifact))}
    projection.client.delete_registered_model("under.way")
    monkeypatch.setattr("pipeline.tracking.registry.ABANDONED_S", -1.0)
    registered(projection, item, artifact)
    assert others.model_id not in {found.model_id for found in uploads(projection, str(item.artifact))}


def test_two_campaigns_that_register_one_artifact_together_make_one_version(projection: Projection, artifact: Artifact) -> None:
    item = outcome("together", artifact="sha256:" + 32 * "18")
    client, others = projection.client, []

    class Slow(MlflowClient):  # type: ignore[misc]
        def log_model_artifacts(self, model_id: str, local_dir: str) -> None:
            others.append(registered(projection, item, artifact, campaign="another"))  # begun, and ended, meanwhile
            super().log_model_artifacts(model_id, local_dir)

    slow = Slow(client.tracking_uri)
    settings: dict[str, Any] = {"run_id": None, "mode": "copy", "store_uri": "store", "campaign": "first"}
    assert register(slow, projection.experiment_id, item, artifact, **settings) == others[0]
    assert [str(found.version) for found in client.search_model_versions("name = 'together'")] == others
    assert str(client.get_model_version_by_alias("together", "portable").version) == others[0]
    assert len(uploads(projection, str(item.artifact))) == 1


def test_a_damaged_artifact_is_not_registered(projection: Projection, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(artifact.manifest.to_bytes())
    with pytest.raises(IntegrityError, match="missing"):
        registered(projection, outcome("damaged", artifact="sha256:" + 64 * "6"), Artifact.read(tmp_path))
    assert not projection.client.search_registered_models("name = 'damaged'")


def alias_of(projection: Projection, name: str, device_class: str) -> str:
    return str(projection.client.get_model_version_by_alias(name, device_class).version)


def test_a_class_that_keeps_eager_is_served_by_the_portable_artifact(projection: Projection, artifact: Artifact) -> None:
    item = outcome("kept", artifact="sha256:" + 64 * "7")
    kept = replace(item, device_class="cpu-x86-64-v3", verdict="kept-eager")
    assert alias(projection.client, kept) is None, "there is nothing yet to point to"
    version = registered(projection, item, artifact)
    assert alias(projection.client, kept) is True
    assert alias(projection.client, kept) is False
    assert alias_of(projection, "kept", "cpu-x86-64-v3") == version


def test_what_serves_a_class_that_keeps_eager_is_registered_as_what_it_is(projection: Projection, artifact: Artifact) -> None:
    kept = outcome("kept.alone", artifact="sha256:" + 64 * "8", device_class="cpu-x86-64-v3", verdict="kept-eager", recipe=None)
    version = registered(projection, kept, artifact)
    assert alias_of(projection, "kept.alone", "cpu-x86-64-v3") == version
    found = projection.client.get_model_version("kept.alone", version)
    assert found.tags["coldpress.device_class"] == "portable"
    (upload,) = uploads(projection, str(kept.artifact))
    assert (upload.name, upload.params["recipe"]) == ("kept-alone-portable", "portable")


def test_an_alias_never_goes_back_to_an_older_version_of_the_store(projection: Projection, artifact: Artifact) -> None:
    old, new = outcome("forward", artifact="sha256:" + 64 * "9"), outcome("forward", artifact="sha256:" + 64 * "b", version=4)
    first, second = registered(projection, old, artifact), registered(projection, new, artifact)
    assert alias(projection.client, old) is False
    assert alias_of(projection, "forward", "portable") == second
    assert registered(projection, old, artifact) == first
    assert alias_of(projection, "forward", "portable") == second
    again = replace(old, version=5)  # the older artifact, carried into a newer version
    assert alias(projection.client, again) is True
    assert alias_of(projection, "forward", "portable") == first
    assert projection.client.get_model_version("forward", first).tags["coldpress.version"] == "5"
    assert alias(projection.client, new) is False
    assert alias_of(projection, "forward", "portable") == first
    elsewhere = replace(old, artifact="sha256:" + 64 * "c", version=1)
    other = registered(projection, elsewhere, artifact, store_uri="another")
    assert alias_of(projection, "forward", "portable") == other, "versions of different stores have no order"


def test_a_model_is_registered_under_the_name_and_with_the_tags_of_its_entry(projection: Projection, artifact: Artifact) -> None:
    given = {"team": "risk", "a=b": "1", "/root": "2", "mlflow.runName": "mine", "coldpress.artifact": "mine", "long": "x" * 5000}
    name = """Joe's "best" model-frozen"""
    item = outcome("joe", artifact="sha256:" + 64 * "d", registered_name=name, tags=given)
    for _ in range(2):
        run_id = projection.log_outcome(item, artifact.manifest)
        version = registered(projection, item, artifact, run_id=run_id)
    expected = {"team": "risk", "a_b": "1", "_root": "2", "mlflow_runName": "mine", "coldpress.artifact": str(item.artifact)}
    found = projection.client.get_model_version(name, version)
    assert (version, found.run_id) == ("1", run_id)
    assert expected.items() <= found.tags.items()
    assert len(found.tags["long"]) == 1000
    run = projection.client.get_run(run_id)
    assert expected.items() <= run.data.tags.items()
    assert run.info.run_name == "joe · portable · portable"
    assert not projection.client.search_registered_models("name = 'joe'")


def test_by_reference_the_artifact_stays_in_its_store(projection: Projection, artifact: Artifact, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    version = store.publish("referred", source_key="k", artifacts={"portable": artifact}, carried={})
    item = outcome("referred", artifact=str(version.images["portable"]["digest"]), version=version.number)
    registered(projection, item, artifact, mode="reference", store_uri=str(store.root))
    (upload,) = uploads(projection, str(item.artifact))
    folder = Path(upload.artifact_location.removeprefix("file://")) / "artifact"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "store.json"]
    model = mlflow.pyfunc.load_model("models:/referred@portable")
    assert model.predict(X).shape == (2, 3)
    changed = replace(artifact.manifest, provenance={"source": "another"}, version=version.number)
    (folder / "manifest.json").write_bytes(changed.to_bytes())
    with pytest.raises(IntegrityError, match="register it again"):
        mlflow.pyfunc.load_model("models:/referred@portable")
