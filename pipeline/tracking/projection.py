"""Projection of a campaign to MLflow: a parent run for the campaign, a run for every candidate, a
summary, all in one experiment.

Every step can be repeated by this driver, by the next one after a crash, or by a replay: a complete
run with the outcome's digest is left alone, any other is replaced. The ledger's lock ensures
that one process writes for a campaign at a time.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.codec import frozen
from freezer.errors import InfrastructureError
from pipeline.ledger import CampaignRecord
from pipeline.records import Outcome, Outcomes, Place
from pipeline.tracking.campaign_summary import (
    NOTE,
    campaign_description,
    campaign_metrics,
    outcomes_digest,
    run_status,
    summary_table,
)
from pipeline.tracking.connection import (
    all_pages,
    connect,
    database_file,
    reaching,
    resolve,
    upload,
)
from pipeline.tracking.run_records import (
    CAMPAIGN,
    KIND,
    OUTCOME,
    RunRecord,
    run_records,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "coldpress"
"""Name of the experiment, unless MLFLOW_EXPERIMENT_NAME is set."""

ABOUT = (
    "Models frozen by Coldpress. A campaign is a run; its children are the candidates: a recipe on"
    " a model for a device class."
)
"""Description of the experiment."""

PARENT = "mlflow.parentRunId"
SUMMARY, REPORT = "summary.json", "report.html"
COMPLETE = "coldpress.outcomes"
"""Tag with the digest of the outcomes that are completely logged and registered; empty while
outcomes are being logged.
"""

PAGE_SIZE = 1000

VIEWS = json.loads((Path(__file__).parent / "views.json").read_text())
"""Saved views of the runs' table, by name, as MLflow's pages save them in tags of an experiment."""

VIEW = "mlflow.sharedViewState."
"""Prefix of these tags."""


@frozen
class LoggedRun:
    """Existing run of a candidate.

    Attributes:
        digest: digest of the record that was logged; empty if its driver died meanwhile.
    """

    run_id: str
    digest: str


class Projection:
    """A campaign in MLflow: `start`, `log_outcome` for each outcome, `finish`. Creates the database
    and the experiment if they do not exist.

    Every method raises InfrastructureError when MLflow cannot be reached or rejects a request; what
    was logged before stays.

    Args:
        tracking_uri: URI of MLflow.
        campaign: name.

    Attributes:
        client: client of the tracking server and registry.
        experiment_id: experiment of all campaigns.
        tracking_uri: absolute URI.
        campaign: name.
        is_complete: whether an earlier driver recorded that every outcome is logged and registered.

    Raises:
        InfrastructureError: nothing answers at the URI; raised within seconds.
        UsageError: the URI names a folder.
    """

    def __init__(self, tracking_uri: str, campaign: str) -> None:
        self.tracking_uri = resolve(tracking_uri)
        self.campaign = campaign
        self.client = connect(self.tracking_uri, create=True)
        with reaching(self.tracking_uri):
            self.experiment_id = open_experiment(self.client, self.tracking_uri)
        self.is_complete = False
        self._parent: Run | None = None
        self._runs: dict[Place, dict[str, LoggedRun]] = {}

    def start(self, record: CampaignRecord, expected: str | None = None) -> None:
        """Find or create the campaign's parent run, and find the runs of its candidates.

        Args:
            record: of the campaign.
            expected: `outcomes_digest` of a campaign that has no work left. If the run's tag
                matches it, the runs of candidates are not searched.
        """
        with reaching(self.tracking_uri):
            parents = self._find("campaign")
            shown = [run.data.tags.get(COMPLETE) for run in parents]
            self.is_complete = expected is not None and shown == [expected]
            candidates = [] if self.is_complete else self._find("candidate")
            self._runs = {}
            for run in sorted(candidates, key=_is_incomplete):
                self._remember(run)
            named = {run.data.tags.get(PARENT) for run in candidates}
            parents.sort(key=lambda run: run.info.run_id not in named)
            for duplicate in parents[1:]:  # of a server that died during a request
                self.client.delete_run(duplicate.info.run_id)
            self._parent = (
                parents[0]
                if parents
                else self.client.create_run(
                    self.experiment_id,
                    start_time=int(record.started * 1000),
                    tags={CAMPAIGN: self.campaign, KIND: "campaign"},
                    run_name=f"campaign {self.campaign}",
                )
            )
            run_id = self._parent.info.run_id
            if not self.is_complete:
                self.client.set_tag(run_id, COMPLETE, "")
            if not self._parent.data.params:
                self._log(run_id, params={"catalog": record.catalog, **record.parameters})
            self.client.update_run(run_id, status="RUNNING")

    def log_outcome(self, outcome: Outcome, *, reached: float | None = None) -> str | None:
        """Log a run for each candidate, or one for an outcome without candidates.

        Args:
            outcome: outcome to log; log it again when it has changed.
            reached: seconds since the epoch; None means now.

        Returns:
            The id of the run of the outcome's recipe, or None.
        """
        records = run_records(outcome, self.campaign)
        ended = time.time() if reached is None else reached
        runs = self._runs.setdefault(outcome.place, {})
        with reaching(self.tracking_uri):
            for recipe in runs.keys() - {record.recipe for record in records}:
                self.client.delete_run(runs.pop(recipe).run_id)
            for record in records:
                runs[record.recipe] = self._log_record(record, runs.get(record.recipe), ended)
        return runs[outcome.recipe].run_id if outcome.recipe in runs else None

    def finish(
        self,
        outcomes: Outcomes,
        record: CampaignRecord,
        page: bytes = b"",
        *,
        complete: bool = False,
    ) -> None:
        """Write the campaign's description, summary and counts, and end its run.

        Args:
            outcomes: all outcomes of the campaign, in the order to show.
            record: of the campaign, which has ended.
            page: HTML report of the campaign; empty for none.
            complete: whether every outcome was completely logged and registered.
        """
        assert self._parent is not None, "start comes first"
        assert record.finished is not None, "it has ended"
        tags = {
            COMPLETE: outcomes_digest(outcomes) if complete else "",
            NOTE: campaign_description(outcomes),
        }
        files = {SUMMARY: summary_table(outcomes).encode()}
        if page:
            files[REPORT] = page
        ended_ms = int(record.finished * 1000)
        info = self._parent.info
        with reaching(self.tracking_uri):
            self._upload(info.artifact_uri, files)
            self._log(info.run_id, campaign_metrics(outcomes), tags=tags, timestamp_ms=ended_ms)
            self.client.set_terminated(info.run_id, status=run_status(record), end_time=ended_ms)

    def _log_record(
        self,
        record: RunRecord,
        known: LoggedRun | None,
        ended: float,
    ) -> LoggedRun:
        if known is not None:
            if known.digest == record.digest:
                return known
            self.client.delete_run(known.run_id)
        started_ms = int((ended - record.duration_s) * 1000)
        assert self._parent is not None, "start comes first"
        run = self.client.create_run(
            self.experiment_id,
            start_time=started_ms,
            tags={**record.tags, PARENT: self._parent.info.run_id},
            run_name=record.name,
        )
        run_id = run.info.run_id
        self._log(run_id, record.metrics, params=record.params, timestamp_ms=started_ms)
        if record.texts:
            files = {name: text.encode() for name, text in record.texts.items()}
            if record.explanation:
                files["explained.svg"] = record.explanation.svg().encode()
            self._upload(run.info.artifact_uri, files)
        self.client.set_terminated(
            run_id,
            status=record.status,
            end_time=int(ended * 1000),
        )
        return LoggedRun(run_id=run_id, digest=record.digest)

    def _upload(self, artifact_uri: str, files: Mapping[str, bytes]) -> None:
        """Upload files, by name."""
        with tempfile.TemporaryDirectory(prefix="coldpress-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            upload(self.client, artifact_uri, Path(folder))

    def _log(
        self,
        run_id: str,
        metrics: Mapping[str, float] = {},
        *,
        params: Mapping[str, str] = {},
        tags: Mapping[str, str] = {},
        timestamp_ms: int = 0,
    ) -> None:
        """Log to a run in one request."""
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, timestamp_ms, step=0) for name, value in metrics.items()],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _find(self, kind: str) -> list[Run]:
        """Return the campaign's runs of one kind, oldest first."""
        wanted = f"tags.`{CAMPAIGN}` = \"{self.campaign}\" AND tags.`{KIND}` = '{kind}'"
        return all_pages(
            lambda token: self.client.search_runs(
                [self.experiment_id],
                wanted,
                max_results=PAGE_SIZE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
        )

    def _remember(self, run: Run) -> None:
        """Note the run of a candidate; delete it if another is noted already."""
        tags = run.data.tags
        runs = self._runs.setdefault((tags["coldpress.model"], tags["coldpress.device_class"]), {})
        recipe = tags["coldpress.recipe"]
        if recipe in runs:
            self.client.delete_run(run.info.run_id)
            return
        digest = "" if _is_incomplete(run) else tags[OUTCOME]
        runs[recipe] = LoggedRun(run_id=run.info.run_id, digest=digest)


def _is_incomplete(run: Run) -> bool:
    return bool(run.info.status == "RUNNING")


def gains_link(server: str, experiment_id: str) -> str:
    """Return the address of the view `gains` on an MLflow server, in training mode."""
    page = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    return f"{page}?workflowType=machine_learning&viewStateShareKey=gains"


def open_experiment(client: MlflowClient, tracking_uri: str) -> str:
    """Find or create the experiment of all campaigns with its views, and return its id.

    Raises:
        InfrastructureError: the experiment was deleted.
        MlflowException: MLflow rejects a request.
    """
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        path = database_file(tracking_uri)
        # Beside the database, not in the working directory of the first driver.
        location = None if path is None else (path.parent / "mlruns" / name).as_uri()
        try:
            client.create_experiment(
                name,
                artifact_location=location,
                tags={NOTE: ABOUT},
            )
        except MlflowException as error:  # another driver may create it at the same moment
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise InfrastructureError(
            f"MLflow's experiment {name!r} at {tracking_uri} was deleted; restore it with"
            " `mlflow experiments restore -x ID` or remove it permanently with `mlflow gc`"
        )
    for name, state in VIEWS.items():
        view = {"name": name, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
        client.set_experiment_tag(found.experiment_id, f"{VIEW}{name}", json.dumps(view))
    return str(found.experiment_id)
