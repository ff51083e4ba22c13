"""MLflow's pages answer what a campaign did: descriptions, parameters, outputs, step series."""

from __future__ import annotations

from mlflow.entities import Run

from freezer.artifact import Artifact
from pipeline.records import Failure, Outcome
from pipeline.tracking import CampaignEnd, CampaignStart
from pipeline.tracking.descriptions import NOTE
from pipeline.tracking.projection import Projection
from tests.support.outcomes import failed, outcome
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


def test_a_campaign_describes_its_largest_gain(projection: Projection) -> None:
    gone = failed("gone", failure=Failure(kind="source", code="CP-SOURCE", message=""))
    gains = [gain(f"model-{number}", 1.0 + number) for number in range(1, 4)]
    noisy = gain("noisy", 512.0, clock="disturbed")
    run = finished(projection, [*gains, gone, noisy])
    text = run.data.tags[NOTE]
    assert text.startswith("**5 outcomes: 4 published, 1 failed**")
    assert f"model-3 for {CLASS}, **4.00×**" in text
    assert f'mlflow.pyfunc.load_model("models:/model-3@{CLASS}")' in text
    assert run.data.metrics["speedup/largest"] == 4.0
    assert run.data.metrics["speedup/median"] == 3.0


def test_a_campaign_has_parameters_and_its_catalog(projection: Projection) -> None:
    projection = Projection(projection.tracking_uri, "with parameters")
    projection.start(
        CampaignStart(
            catalog="models/catalog.yaml",
            started=0.0,
            parameters={"torch": "2.13.0", "git_commit": "abc"},
        )
    )
    run = finished(projection, [outcome("one"), gain("two", 2.0)])
    expected = {
        "catalog": "models/catalog.yaml",
        "torch": "2.13.0",
        "git_commit": "abc",
    }
    assert run.data.params == expected
    again = Projection(projection.tracking_uri, projection.campaign)
    again.start(
        CampaignStart(
            catalog="models/catalog.yaml",
            started=0.0,
            parameters={"torch": "2.14.0", "git_commit": "abc"},
        )
    )
    run = finished(again, [outcome("one"), gain("two", 3.0)])
    assert run.data.params == expected, "MLflow's parameters cannot be changed"


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
