"""MLflow's pages answer what a campaign did: descriptions, parameters, inputs, outputs, step
series, lineage.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlflow.entities import Run

from freezer.artifact import Artifact
from pipeline.records import SOURCE_MODEL, SOURCE_VERSION, Failure, Outcome, OutputDrift
from pipeline.tracking import CampaignEnd, CampaignStart, resolve_model
from pipeline.tracking.descriptions import (
    MAX_CHARS,
    NOTE,
    model_description,
    version_description,
)
from pipeline.tracking.projection import Projection
from pipeline.tracking.tracker import tag_source
from tests.support.outcomes import candidate, failed, outcome
from tests.support.past_campaigns import past_point
from tests.support.projections import by_recipe, registered, runs_of

CLASS = "cpu-x86-64-v4"


def gain(model: str, speedup: float, **changes: object) -> Outcome:
    return outcome(model, device_class=CLASS, recipe="portable", speedup=speedup, **changes)


def without_spaces(text: str) -> str:
    """A description without the spaces between the columns of its tables."""
    return text.replace("&ensp; ", "")


def parent_of(projection: Projection) -> Run:
    (run,) = runs_of(projection, "campaign")
    return projection.client.get_run(run.info.run_id)


def finished(projection: Projection, outcomes: list[Outcome]) -> Run:
    for item in outcomes:
        projection.log_outcome(item)
    projection.finish(outcomes, CampaignEnd(exit_code=1, finished=1_700_000_100.0))
    return parent_of(projection)


# Campaigns


def test_a_campaign_describes_gains_and_failures(projection: Projection) -> None:
    gone = failed("gone", failure=Failure(kind="source", code="CP-SOURCE", message=""))
    gains = [gain(f"model-{number}", 1.0 + number) for number in range(1, 4)]
    noisy = gain("noisy", 512.0, clock="disturbed")
    run = finished(projection, [*gains, gone, noisy])
    text = without_spaces(run.data.tags[NOTE])
    assert text.startswith("**5 outcomes: 4 published, 1 failed**  \n")
    assert f"[model-3](#/models/model-3) for {CLASS}, **4.00×**." in text
    assert f'mlflow.pyfunc.load_model("models:/model-3@{CLASS}")' in text
    assert "| `gone` | portable | failed | CP-SOURCE |" in text
    assert run.data.metrics["speedup/largest"] == 4.0
    assert run.data.metrics["speedup/median"] == 3.0


def test_a_description_is_never_cut_by_mlflow(projection: Projection) -> None:
    outcomes = [
        failed(f"model-{number}-{'x' * 90}", reason=f"{number} {'why ' * 500}")
        for number in range(300)
    ]
    projection.finish(outcomes, CampaignEnd(exit_code=1, finished=1_700_000_100.0))
    text = parent_of(projection).data.tags[NOTE]
    assert text.startswith("**300 outcomes: 300 failed**")
    assert len(text) <= MAX_CHARS


def test_a_campaign_has_parameters_and_its_catalog(projection: Projection) -> None:
    projection.start(
        CampaignStart(
            catalog="models/catalog.yaml",
            started=0.0,
            parameters={"torch": "2.13.0", "git_commit": "abc"},
        )
    )
    run = finished(projection, [outcome("one"), gain("two", 2.0)])
    expected = {
        "catalog": "catalog.yaml",
        "torch": "2.13.0",
        "git_commit": "abc",
        "recipes": "portable, torchscript-frozen",
    }
    assert run.data.params == expected
    again = Projection.open(projection.tracking_uri, projection.campaign)
    again.start(
        CampaignStart(
            catalog="models/catalog.yaml",
            started=0.0,
            parameters={"torch": "2.14.0", "git_commit": "abc"},
        )
    )
    run = finished(again, [outcome("one"), gain("two", 3.0)])
    assert run.data.params == expected, "MLflow's parameters cannot be changed"
    assert "torch `2.14.0`" in run.data.tags[NOTE]


# Candidates


def test_a_candidate_has_series_of_latency_and_drift(projection: Projection) -> None:
    sets = tuple(
        OutputDrift(output="out/0", kind="single", set_index=index, error_ratio=1.0 + index)
        for index in (2, 0, 1)
    )
    point = (past_point({"batch": 1, "length": 8}, speedup=2.0),)
    made = (
        candidate("portable", outputs=sets, points=point),
        candidate("torchscript-frozen", outputs=sets[:1]),
    )
    deciles = {
        "eager": tuple(float(n) for n in range(2, 13)),
        "portable": tuple(float(n) for n in range(1, 12)),
    }
    projection.log_outcome(outcome("series", candidates=made, deciles_ms=deciles))
    runs = by_recipe(projection)

    def history(recipe: str, name: str) -> dict[int, float]:
        return {
            item.step: item.value
            for item in projection.client.get_metric_history(runs[recipe].info.run_id, name)
        }

    assert history("portable", "latency_ms/by percentile") == {
        10 * step: 1.0 + step for step in range(11)
    }
    assert history("portable", "drift by input set/out_0") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert runs["portable"].data.params["point"] == "batch 1, length 8"
    assert not [name for name in runs["torchscript-frozen"].data.metrics if "by " in name]


def test_descriptions_mark_figures_of_disturbed_rounds() -> None:
    noisy = gain("noisy", 512.0, clock="disturbed")
    assert "~512.00" in model_description([noisy])
    assert "~512.00" in version_description(noisy, CLASS, "./store")


# The registry


def test_registered_models_describe_what_serves(projection: Projection, artifact: Artifact) -> None:
    item = gain("told-model", 2.0, artifact="sha256:" + 32 * "21", registered_name="Told frozen")
    run_id = projection.log_outcome(item)
    assert registered(projection, item, artifact, run_id=run_id, serving=CLASS)
    model = projection.client.get_registered_model("Told frozen")
    version = projection.client.get_model_version("Told frozen", "1")
    assert f'load_model("models:/Told frozen@{CLASS}")' in model.description
    assert str(item.artifact) in version.description
    assert 'freezer.load("told-model", store=' in version.description
    assert version.tags["coldpress.speedup"] == "2.00"
    (output,) = projection.client.get_run(str(run_id)).outputs.model_outputs
    assert output.model_id == version.source.removeprefix("models:/")

    faster = replace(
        item, artifact="sha256:" + 32 * "22", version=4, figures=replace(item.figures, speedup=2.5)
    )
    for again in (faster, item):
        registered(projection, again, artifact, run_id=run_id)
        assert "2.50×" in projection.client.get_registered_model("Told frozen").description


# Sources in the registry


@pytest.fixture
def source_tags(projection: Projection, request: pytest.FixtureRequest) -> dict[str, str]:
    """The tags of an outcome that was made from version 1 of a registered model."""
    name = f"source of {request.node.name}"
    projection.client.create_registered_model(name)
    projection.client.create_model_version(name, source="file:///nowhere", tags={"own": "1"})
    return {SOURCE_MODEL: name, SOURCE_VERSION: "1"}


def test_a_source_version_names_its_artifacts(
    projection: Projection, source_tags: dict[str, str]
) -> None:
    client, name = projection.client, source_tags[SOURCE_MODEL]
    before = resolve_model(projection.tracking_uri, f"models:/{name}")
    made = [
        gain("made", 2.0, tags=source_tags, registered_name="made-frozen"),
        failed("made", tags=source_tags),
    ]
    tag_source(client, "first", made, 1_700_000_000.0)
    tags = client.get_model_version(name, "1").tags
    assert tags == {
        "own": "1",
        "coldpress.status": f"{CLASS}: published; portable: failed",
        "coldpress.campaign": "first",
        "coldpress.judged": "2023-11-14T22:13:20+00:00",
        f"coldpress.artifact.{CLASS}": f"models:/made-frozen@{CLASS}",
    }
    after = resolve_model(projection.tracking_uri, f"models:/{name}")
    assert replace(after, tags={}) == replace(before, tags={}), (
        "still a source, with the same identity"
    )

    tag_source(client, "first", made, 1_700_000_900.0)
    assert client.get_model_version(name, "1").tags == tags, "repeated"
    tag_source(client, "older", [replace(made[0], verdict="rejected")], 1_600_000_000.0)
    assert client.get_model_version(name, "1").tags == tags
    tag_source(client, "later", [replace(item, cached=True) for item in made], 1_800_000_000.0)
    assert client.get_model_version(name, "1").tags == tags, "taken over from an earlier campaign"
    tag_source(
        client, "later", [replace(made[0], verdict="rejected", artifact=None)], 1_800_000_000.0
    )
    assert client.get_model_version(name, "1").tags["coldpress.status"] == f"{CLASS}: rejected"


def test_a_deleted_source_is_ignored(projection: Projection, source_tags: dict[str, str]) -> None:
    projection.client.delete_registered_model(source_tags[SOURCE_MODEL])
    tag_source(projection.client, "first", [gain("made", 2.0, tags=source_tags)], 1.0)
