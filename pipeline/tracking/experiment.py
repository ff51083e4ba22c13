"""The experiment of all campaigns in MLflow, and its page: a description, and saved views of the
runs' table.

MLflow's pages read both from tags of the experiment. Without a view the table shows name and date
of a run, but no figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freezer.errors import InfrastructureError
from pipeline.tracking.connection import database_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "coldpress"

NOTE = "mlflow.note.content"
"""Tag of an experiment or run with its description, in Markdown."""

FORM = "1"
"""Version of the tags below. Increase it to write them again to existing experiments."""

PAGE_FORM = "coldpress.page"
"""Tag of an experiment with the FORM of its tags."""

_SAVED_VIEW = "mlflow.sharedViewState."
_KIND, _MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag of the views that open.

Pages with a switch between GenAI and model training, as MLflow 3.17's, read the browser's choice.
"""

_PRIMARY_METRIC = "mlflow.experiment.primaryMetric.name"


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved view of the runs' table.

    Attributes:
        about: what it shows, for the experiment's description.
        filter: as of `MlflowClient.search_runs`.
        order_by: column, largest values first. Of runs in another order than by time, children are
            not below their parents.
        columns: shown next to the run's name; `attributes.Description` or `metrics.speedup/value`.
    """

    name: str
    about: str
    filter: str
    order_by: str
    columns: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in links and tags."""
        return f"coldpress-{self.name.lower().replace(' ', '-')}"


VIEWS = (
    _View(
        name="Campaigns",
        about="every campaign with its counts, the newest first",
        filter="tags.`coldpress.kind` = 'campaign'",
        order_by="attributes.start_time",
        columns=(
            "metrics.speedup/largest",
            "metrics.speedup/median",
            "metrics.outcomes/published",
            "metrics.outcomes/kept-eager",
            "metrics.outcomes/kept-previous",
            "metrics.outcomes/rejected",
            "metrics.outcomes/failed",
            "metrics.outcomes/unstable",
        ),
    ),
    _View(
        name="Gains",
        about="published artifacts, the largest speedup first",
        filter="tags.`coldpress.winner` = 'true'",
        order_by="metrics.speedup/value",
        columns=(
            "metrics.speedup/value",
            "metrics.latency_ms/eager_p50",
            "metrics.latency_ms/p50",
            "metrics.drift/error_ratio",
            "metrics.size_mb/payloads",
            "tags.coldpress.campaign",
            "attributes.Models",
        ),
    ),
    _View(
        name="Not published",
        about=(
            "candidates of models that kept eager or the previous artifact, were rejected, failed"
            " or were unstable, and why"
        ),
        filter="tags.`coldpress.kind` = 'candidate' AND tags.`coldpress.verdict` != 'published'",
        order_by="tags.coldpress.verdict",
        columns=(
            "tags.coldpress.verdict",
            "tags.coldpress.code",
            "tags.coldpress.reason",
            "tags.coldpress.campaign",
            "metrics.speedup/value",
            "metrics.drift/error_ratio",
        ),
    ),
)
_WIDTHS = {"tags.coldpress.reason": 700}
_WIDTH = 170


def open_experiment(client: MlflowClient, tracking_uri: str) -> str:
    """Find or create the experiment, set the tags of its page unless they are set, and return its
    id.

    Raises:
        InfrastructureError: the experiment was deleted.
        MlflowException: MLflow rejects a request.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        path = database_file(tracking_uri)
        # Beside the database, not in the working directory of the first driver.
        location = None if path is None else (path.parent / "mlruns" / EXPERIMENT).as_uri()
        try:
            client.create_experiment(EXPERIMENT, artifact_location=location)
        except MlflowException as error:  # another driver may create it at the same moment
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(EXPERIMENT)
    if found is None or found.lifecycle_stage != "active":
        raise InfrastructureError(
            f"MLflow's experiment {EXPERIMENT!r} at {tracking_uri} was deleted; restore it with"
            " `mlflow experiments restore -x ID` or remove it permanently with `mlflow gc`"
        )
    for name, text in experiment_tags(
        found.experiment_id, found.tags, int(time.time() * 1000)
    ).items():
        client.set_experiment_tag(found.experiment_id, name, text)
    return str(found.experiment_id)


def experiment_tags(experiment_id: str, existing: Mapping[str, str], now_ms: int) -> dict[str, str]:
    """Return the tags to set on an experiment: none if it has those of this release.

    Args:
        experiment_id: of the experiment; links contain it.
        existing: its tags. A description that a person wrote stays.
        now_ms: milliseconds since the epoch.
    """
    if existing.get(PAGE_FORM) == FORM:
        return {}
    views = {f"{_SAVED_VIEW}{view.key}": _saved(view, now_ms) for view in VIEWS}
    page = {**views, _KIND: _MODEL_TRAINING, _PRIMARY_METRIC: "speedup/value", PAGE_FORM: FORM}
    return (
        page
        if NOTE in existing and PAGE_FORM not in existing
        else {**page, NOTE: _description(experiment_id)}
    )


def _description(experiment_id: str) -> str:
    runs = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    links = {view: f"[{view.name}]({runs}&viewStateShareKey={view.key})" for view in VIEWS}
    lines = [
        # MLflow's pages show the first line at once
        f"Models frozen by Coldpress: {' · '.join(links.values())}",
        "",
        (
            "A campaign is a run; its children are the candidates: a recipe on a model for a device"
            " class."
        ),
        "",
        *(f"- {link}: {view.about}" for view, link in links.items()),
        "",
        (
            "If this page shows traces and evaluations, switch from *GenAI* to *Model training*, or"
            " follow one of the links."
        ),
    ]
    return "\n".join(lines)


def _saved(view: _View, now_ms: int) -> str:
    """Return a view in the form that MLflow's pages save and read."""
    columns = [_quoted(column) for column in view.columns]
    state = {
        "searchFilter": view.filter,
        "orderByKey": (
            view.order_by if view.order_by.startswith("attributes.") else _quoted(view.order_by)
        ),
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {_quoted(column): _WIDTHS.get(column, _WIDTH) for column in view.columns},
    }
    return json.dumps(
        {"name": view.name, "createdAt": now_ms, "updatedAt": now_ms, "state": json.dumps(state)}
    )


def _quoted(column: str) -> str:
    kind, _, name = column.partition(".")
    return f"{kind}.`{name}`"
