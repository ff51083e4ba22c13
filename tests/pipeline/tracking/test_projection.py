"""Outcomes and the summary as runs in a real sqlite MLflow; each test has its own campaign."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from freezer.artifact import (
    MeasuredDrift,
    MeasuredLatency,
)
from pipeline.ledger import CampaignRecord
from pipeline.records import Failure, Outcome
from pipeline.tracking import gains_link, outcomes_digest
from pipeline.tracking.projection import Projection
from tests.support.outcomes import DIGEST, candidate, failed, outcome
from tests.support.projections import by_recipe, runs_of


def resumed(projection: Projection, *expected: Outcome) -> Projection:
    """The same campaign, in a driver that expects these outcomes."""
    again = Projection(projection.tracking_uri, projection.campaign)
    digest = outcomes_digest(expected) if expected else None
    again.start(RECORD, digest)
    return again


RECORD = CampaignRecord(catalog="catalog.yaml", started=0.0)
FINISHED = replace(RECORD, exit_code=0, finished=1_700_000_100.0)


def text_of(projection: Projection, run_id: str, path: str) -> str:
    return Path(projection.client.download_artifacts(run_id, path)).read_text()


def test_a_candidate_becomes_a_run(projection: Projection) -> None:
    run_id = projection.log_outcome(outcome("runs"), reached=1_700_000_010.0)
    runs = by_recipe(projection)
    assert set(runs) == {"portable", "torchscript-frozen"}
    winner = runs["portable"]
    assert (winner.info.run_id, winner.info.status) == (run_id, "FINISHED")
    assert (winner.info.start_time, winner.info.end_time) == (1_700_000_007_500, 1_700_000_010_000)
    assert set(winner.data.params) == {"source", "num_threads", "capture"}
    expected_metrics = {"drift/error_ratio": 1.25, "speedup/ci_low": 1.8, "build_s/total": 2.5}
    assert expected_metrics.items() <= winner.data.metrics.items()
    expected = {
        "mlflow.parentRunId": runs_of(projection, "campaign")[0].info.run_id,
        "coldpress.campaign": projection.campaign,
        "coldpress.verdict": "published",
        "coldpress.winner": "true",
        "coldpress.model": "runs",
        "coldpress.recipe": "portable",
        "coldpress.artifact": DIGEST,
        "coldpress.version": "3",
    }
    assert expected.items() <= winner.data.tags.items()
    loser = runs["torchscript-frozen"].data.tags
    assert (loser["coldpress.problem"], loser["coldpress.winner"]) == (
        "error_ratio 41.2 > 3",
        "false",
    )


def test_a_failed_candidate_becomes_a_failed_run(projection: Projection) -> None:
    broken = candidate(
        "inductor-frozen",
        problem="x" * 5000,
        failure="build",
        drift=MeasuredDrift(),
        latency_ms=MeasuredLatency(),
        num_payloads=0,
    )
    failure = Failure(kind="build", log_tail="g++: fatal error")
    projection.log_outcome(
        outcome("broken", candidates=(candidate("portable"), broken), failure=failure)
    )
    runs = by_recipe(projection)
    run = runs["inductor-frozen"]
    assert run.info.status == "FAILED"
    assert run.data.tags["coldpress.problem"].startswith("xxx")
    assert len(run.data.tags["coldpress.problem"]) == 1000
    assert text_of(projection, run.info.run_id, "log.txt") == "g++: fatal error"
    assert runs["portable"].info.status == "FINISHED"


def test_an_outcome_without_candidates_becomes_one_run(projection: Projection) -> None:
    assert projection.log_outcome(failed("gone", reason="no such file: gone.pt")) is None
    (run,) = runs_of(projection)
    assert run.info.run_name == "gone · portable · failed: source"
    assert run.info.status == "FAILED"
    assert run.data.tags["coldpress.reason"].endswith("no such file: gone.pt")
    assert text_of(projection, run.info.run_id, "log.txt") == "Traceback: gone"


# Idempotence


def test_a_changed_outcome_replaces_its_runs(projection: Projection) -> None:
    projection.log_outcome(failed("changed", "timeout"))
    projection.log_outcome(outcome("changed", candidates=(candidate("portable", speedup=3.0),)))
    projection.log_outcome(
        outcome("changed", candidates=(candidate("portable", speedup=1.5, capture="trace"),))
    )
    (run,) = runs_of(projection)
    assert run.data.tags["coldpress.recipe"] == "portable"
    assert run.data.metrics["speedup/value"] == 1.5
    assert run.data.params["capture"] == "trace"


# The summary


def test_finish_writes_table_figures_and_counts(projection: Projection) -> None:
    outcomes = [
        outcome("one"),
        failed("two", reason="a | b"),
        outcome("three", drift=MeasuredDrift(error_ratio=float("inf")), cached=True),
        outcome(
            "four", device_class="cpu-x86-64-v4", speedup=4.0, drift=MeasuredDrift(error_ratio=2.5)
        ),
        outcome("five", device_class="cpu-x86-64-v4", speedup=3.0),
    ]
    for _ in range(2):
        projection.finish(outcomes, replace(FINISHED, exit_code=1))
    (parent,) = runs_of(projection, "campaign")
    assert parent.info.status == "FINISHED"
    expected = {
        "outcomes/published": 4,
        "outcomes/failed": 1,
        "outcomes/unchanged": 1,
        "build_s/total": 10.0,
        "speedup/largest": 4.0,
        "speedup/median": 3.5,
    }
    assert expected.items() <= parent.data.metrics.items()
    text = text_of(projection, parent.info.run_id, "summary.json")
    table = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["model"] for row in rows] == ["one", "two", "three", "four", "five"]
    assert rows[0]["speedup_ci_low"] == 1.8
    assert rows[2]["error_ratio"] is None
    assert len(projection.client.get_metric_history(parent.info.run_id, "outcomes/total")) == 1


def test_views_show_each_candidates_own_problem(projection: Projection) -> None:
    candidates = (candidate("portable"), candidate("onnxruntime", problem="unsupported"))
    projection.log_outcome(
        outcome("kept", verdict="kept-eager", reason="too slow", candidates=candidates)
    )
    tags = projection.client.get_experiment(projection.experiment_id).tags
    address, _, query = gains_link("http://host:5000", projection.experiment_id).partition("?")
    assert address == f"http://host:5000/#/experiments/{projection.experiment_id}/runs"
    assert dict(parse_qsl(query))["viewStateShareKey"] == "gains"
    problems = {}
    for key in ("gains", "not-published"):
        view = json.loads(json.loads(tags[f"mlflow.sharedViewState.{key}"])["state"])
        runs = projection.client.search_runs([projection.experiment_id], view["searchFilter"])
        problems[key] = {run.data.tags["coldpress.problem"] for run in runs}
    assert problems == {"gains": set(), "not-published": {"too slow", "unsupported"}}


@pytest.mark.parametrize(
    ("exit_code", "interrupted", "status"),
    [(0, False, "FINISHED"), (3, False, "FAILED"), (130, True, "KILLED")],
)
def test_the_parent_run_ends_with_a_status(
    projection: Projection, exit_code: int, interrupted: bool, status: str
) -> None:
    projection.finish([], replace(FINISHED, exit_code=exit_code, interrupted=interrupted))
    assert runs_of(projection, "campaign")[0].info.status == status


def test_a_killed_driver_invalidates_the_completeness_mark(projection: Projection) -> None:
    first, edited = (
        outcome("edited"),
        outcome("edited", judge_key="b", candidates=(candidate("portable", speedup=3.0),)),
    )
    projection.log_outcome(first)
    projection.finish([first], FINISHED, complete=True)
    resumed(projection, edited).log_outcome(edited)  # and is killed
    assert set(by_recipe(projection)) == {"portable"}
    again = resumed(projection, first)
    assert not again.is_complete
    again.log_outcome(first)
    again.finish([first], FINISHED, complete=True)
    assert set(by_recipe(projection)) == {"portable", "torchscript-frozen"}
    assert by_recipe(projection)["portable"].data.metrics["speedup/value"] == 2.0
    assert resumed(projection, first).is_complete
