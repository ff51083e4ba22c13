"""MLflow's pages answer what a campaign did: descriptions, parameters, outputs, step series."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl

from mlflow.entities import Run

from freezer.artifact import Artifact, MeasuredDrift
from pipeline.records import Failure, Outcome
from pipeline.tracking import CampaignEnd, CampaignStart, gains_link
from pipeline.tracking.campaign_summary import NOTE
from pipeline.tracking.projection import Projection
from tests.support.outcomes import candidate, failed, outcome
from tests.support.projections import registered, runs_of

CLASS = "cpu-x86-64-v4"


def gain(model: str, speedup: float, **changes: object) -> Outcome:
    return outcome(model, device_class=CLASS, recipe="portable", speedup=speedup, **changes)


def parent_of(projection: Projection) -> Run:
    (run,) = runs_of(projection, "campaign")
    return projection.client.get_run(run.info.run_id)


def finished(projection: Projection, outcomes: list[Outcome]) -> Run:
    for item in outcomes:
        projection.log_outcome(item)
    projection.finish(outcomes, CampaignEnd(exit_code=1, finished=1_700_000_100.0))
    return parent_of(projection)


# Campaigns


def test_a_campaign_describes_largest_gain_and_drift(projection: Projection) -> None:
    gone = failed("gone", failure=Failure(kind="source", code="CP-SOURCE", message=""))
    gains = [gain(f"model-{number}", 1.0 + number) for number in range(1, 4)]
    noisy = gain("noisy", 512.0, clock="disturbed")
    far = outcome("far", drift=MeasuredDrift(error_ratio=2.5))
    run = finished(projection, [*gains, gone, noisy, far])
    text = run.data.tags[NOTE]
    counts, facts, load = text.split("\n\n")
    assert counts == "**6 outcomes: 5 published, 1 failed**"
    assert f"model-3 for {CLASS}, **4.00×**" in facts
    assert "far for portable, error ratio 2.50" in facts
    assert run.data.metrics["drift/error_ratio_largest"] == 2.5
    assert f'mlflow.pyfunc.load_model("models:/model-3@{CLASS}")' in load
    assert run.data.metrics["speedup/largest"] == 4.0
    assert run.data.metrics["speedup/median"] == 3.0


def test_views_show_each_candidates_own_problem(projection: Projection) -> None:
    candidates = (candidate("portable"), candidate("onnxruntime", problem="unsupported"))
    kept = outcome("kept", verdict="kept-eager", reason="too slow", candidates=candidates)
    projection.log_outcome(kept)
    tags = projection.client.get_experiment(projection.experiment_id).tags
    address, _, query = gains_link("http://host:5000", projection.experiment_id).partition("?")
    assert address == f"http://host:5000/#/experiments/{projection.experiment_id}/runs"
    assert dict(parse_qsl(query)) == {
        "workflowType": "machine_learning",
        "viewStateShareKey": "gains",
    }
    problems = {}
    for key in ("gains", "not-published"):
        view = json.loads(json.loads(tags[f"mlflow.sharedViewState.{key}"])["state"])
        runs = projection.client.search_runs([projection.experiment_id], view["searchFilter"])
        problems[key] = {run.data.tags["coldpress.problem"] for run in runs}
    assert problems == {"gains": set(), "not-published": {"too slow", "unsupported"}}


def test_parameters_of_the_first_pass_stay(projection: Projection) -> None:
    """MLflow's parameters cannot be changed."""
    for torch in ("2.13.0", "2.14.0"):
        opened = Projection(projection.tracking_uri, "with parameters")
        opened.start(CampaignStart(catalog="c.yaml", started=0.0, parameters={"torch": torch}))
        run = finished(opened, [outcome("one")])
        assert run.data.params == {"catalog": "c.yaml", "torch": "2.13.0"}


# Candidates


# The registry


def test_registered_models_describe_what_serves(projection: Projection, artifact: Artifact) -> None:
    item = gain("told-model", 2.0, artifact="sha256:" + 32 * "21", registered_name="Told frozen")
    run_id = projection.log_outcome(item)
    registered(projection, item, artifact, run_id=run_id, serving=CLASS)
    model = projection.client.get_registered_model("Told frozen")
    version = projection.client.get_model_version("Told frozen", "1")
    assert item.source in model.description
    assert f'load_model("models:/Told frozen@{CLASS}")' in version.description
    assert 'freezer.load("told-model", store=' in version.description
    assert version.tags["coldpress.speedup"] == "2.00"
    (output,) = projection.client.get_run(str(run_id)).outputs.model_outputs
    assert output.model_id == version.source.removeprefix("models:/")
