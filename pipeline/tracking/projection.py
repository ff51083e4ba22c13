"""Projection of a campaign to MLflow: a parent run for the campaign, a run for every candidate, a
summary, all in one experiment.

Every step can be repeated by this driver, by the next one after a crash, or by a replay: a run with
the outcome's digest is left alone, a run with another digest is replaced. The ledger's lock ensures
that one process writes for a campaign at a time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import InfrastructureError
from pipeline.records import Outcome
from pipeline.tracking.campaign_summary import (
    CampaignEnd,
    CampaignStart,
    campaign_metrics,
    outcomes_digest,
    recipes_parameter,
    summary_table,
)
from pipeline.tracking.connection import (
    all_pages,
    connect,
    database_file,
    quoted,
    reaching,
    resolve,
    upload,
)
from pipeline.tracking.descriptions import NOTE, campaign_description
from pipeline.tracking.run_records import LoggedRun, RunRecord, run_records

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "coldpress"
ABOUT = (
    "Models frozen by Coldpress. A campaign is a run; its children are the candidates: a recipe on"
    " a model for a device class."
)
"""Description of the experiment."""

PARENT = "mlflow.parentRunId"
LOGGED_TABLES = "mlflow.loggedArtifacts"
"""Tag that lists a run's tables for MLflow's pages and `mlflow.load_table`."""

SUMMARY, REPORT = "summary.json", "report.html"
COMPLETE = "coldpress.outcomes"
"""Tag with the digest of the outcomes that are completely logged and registered; empty while
outcomes are being logged.
"""

PAGE_SIZE = 1000


class Projection:
    """A campaign in MLflow: `open`, `start`, `log_outcome` for each outcome, `finish`.

    Every method raises InfrastructureError when MLflow cannot be reached or rejects a request; what
    was logged before stays.

    Attributes:
        client: client of the tracking server and registry.
        experiment_id: experiment of all campaigns.
        tracking_uri: absolute URI.
        campaign: name.
        num_written: runs created, completed, replaced or deleted by this object.
        is_complete: whether an earlier driver recorded that every outcome is logged and registered.
        is_resumed: whether an earlier driver has logged something, and may have died during an
            upload.
    """

    def __init__(
        self, *, client: MlflowClient, experiment_id: str, tracking_uri: str, campaign: str
    ) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.tracking_uri = tracking_uri
        self.campaign = campaign
        self.num_written = 0
        self.is_complete = self.is_resumed = False
        self._parent = ""
        self._begin = CampaignStart(catalog="", started=0.0)
        self._runs: dict[tuple[str, str], dict[str, LoggedRun]] = {}

    @classmethod
    def open(cls, tracking_uri: str, campaign: str) -> Projection:
        """Connect to MLflow; create the database and the experiment if they do not exist.

        Raises:
            InfrastructureError: nothing answers at the URI; raised within seconds.
            UsageError: the URI names a folder.
        """
        uri = resolve(tracking_uri)
        client = connect(uri)
        with reaching(uri):
            experiment_id = _open_experiment(client, uri)
        return cls(client=client, experiment_id=experiment_id, tracking_uri=uri, campaign=campaign)

    def start(self, begin: CampaignStart) -> str:
        """Find or create the campaign's parent run, and find the runs of its candidates; return the
        id of the parent run.
        """
        self._begin = begin
        with reaching(self.tracking_uri):
            parents = self._find("campaign")
            shown = [run.data.tags.get(COMPLETE) for run in parents]
            self.is_complete = begin.expected is not None and shown == [begin.expected]
            candidates = [] if self.is_complete else self._find("candidate")
            named = {run.data.tags.get(PARENT, "") for run in candidates}
            run = self._only_parent(parents, named)
            self.is_resumed = run is not None
            self._parent = self._create_parent() if run is None else self._reopen(run)
            self._runs = {}
            for candidate in candidates:
                self._remember(candidate)
        return self._parent

    def _create_parent(self) -> str:
        begin = self._begin
        tags = {
            "coldpress.campaign": self.campaign,
            "coldpress.kind": "campaign",
            "coldpress.catalog": begin.catalog,
        }
        run = self.client.create_run(
            self.experiment_id,
            start_time=int(begin.started * 1000),
            tags=tags,
            run_name=f"campaign {self.campaign}",
        )
        self._log(run.info.run_id, params=self._parameters)
        return str(run.info.run_id)

    def _reopen(self, run: Run) -> str:
        run_id = str(run.info.run_id)
        if not self.is_complete and run.data.tags.get(COMPLETE):
            self.client.set_tag(run_id, COMPLETE, "")
        if self._begin.resume and run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        return run_id

    @property
    def _parameters(self) -> dict[str, str]:
        return {"catalog": self._begin.catalog, **self._begin.parameters}

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
        runs = self._runs.setdefault((outcome.model, outcome.device_class), {})
        with reaching(self.tracking_uri):
            for recipe in set(runs) - {record.recipe for record in records}:
                self._delete(runs.pop(recipe))
            for record in records:
                runs[record.recipe] = self._log_record(record, runs.get(record.recipe), ended)
        return runs[outcome.recipe].run_id if outcome.recipe in runs else None

    def finish(
        self, outcomes: Sequence[Outcome], end: CampaignEnd, *, complete: bool = False
    ) -> None:
        """Write the campaign's description, summary and counts, and end its run.

        Args:
            outcomes: all outcomes of the campaign, in the order to show.
            end: how the campaign ended.
            complete: whether every outcome was completely logged and registered.
        """
        tags = {
            "coldpress.exit_code": str(end.exit_code),
            "coldpress.interrupted": str(end.interrupted).lower(),
            LOGGED_TABLES: json.dumps([{"path": SUMMARY, "type": "table"}]),
            COMPLETE: outcomes_digest(outcomes) if complete else "",
            NOTE: campaign_description(outcomes, self._parameters),
        }
        files = {SUMMARY: summary_table(outcomes).encode()}
        if end.page:
            files[REPORT] = end.page
        ended_ms = int(end.finished * 1000)
        metrics = {name: {0: value} for name, value in campaign_metrics(outcomes).items()}
        params = self._parameters | recipes_parameter(outcomes)
        with reaching(self.tracking_uri):
            run = self.client.get_run(self._parent)
            self._upload(run.info.artifact_uri, files)
            # MLflow rejects another value of a parameter: the first pass's stays.
            new = {name: text for name, text in params.items() if name not in run.data.params}
            self._log(self._parent, metrics, params=new, tags=tags, timestamp_ms=ended_ms)
            self.client.set_terminated(self._parent, status=end.status, end_time=ended_ms)

    def _log_record(self, record: RunRecord, known: LoggedRun | None, ended: float) -> LoggedRun:
        if known is not None and known.digest != record.digest:
            self._delete(known)
            known = None
        if known is not None and known.complete:
            return known
        self.num_written += 1
        if known is None:
            run = self.client.create_run(
                self.experiment_id,
                start_time=int((ended - record.duration_s) * 1000),
                tags={**record.tags, PARENT: self._parent},
                run_name=record.name,
            )
            known = LoggedRun.of(run)
        self._log(known.run_id, record.metrics, params=record.params, timestamp_ms=known.started_ms)
        if record.texts:
            files = {name: text.encode() for name, text in record.texts.items()}
            self._upload(known.artifact_uri, files)
        ended_ms = known.started_ms + int(record.duration_s * 1000)
        self.client.set_terminated(known.run_id, status=record.status, end_time=ended_ms)
        return replace(known, complete=True)

    def _delete(self, run: LoggedRun) -> None:
        self.client.delete_run(run.run_id)
        self.num_written += 1

    def _upload(self, artifact_uri: str, files: Mapping[str, bytes]) -> None:
        """Upload files, by name."""
        with tempfile.TemporaryDirectory(prefix="coldpress-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            upload(self.client, artifact_uri, Path(folder))

    def _log(
        self,
        run_id: str,
        metrics: Mapping[str, Mapping[int, float]] | None = None,
        *,
        params: Mapping[str, str],
        tags: Mapping[str, str] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Log to a run in one request; metrics have a value by step, all at the same time."""
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=[
                Metric(name, value, timestamp_ms, step)
                for name, values in (metrics or {}).items()
                for step, value in values.items()
            ],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in (tags or {}).items()],
        )

    def _find(self, kind: str) -> list[Run]:
        """Return the campaign's runs of one kind, oldest first."""
        wanted = (
            f"tags.`coldpress.campaign` = {quoted(self.campaign)} AND tags.`coldpress.kind` ="
            f" '{kind}'"
        )
        return all_pages(
            lambda token: self.client.search_runs(
                [self.experiment_id],
                wanted,
                max_results=PAGE_SIZE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
        )

    def _only_parent(self, parents: Sequence[Run], named: set[str]) -> Run | None:
        """Return the parent run that candidates name; delete duplicates that a server left when it
        died during a request.
        """
        first, *duplicates = sorted(parents, key=lambda run: run.info.run_id not in named) or [None]
        for run in duplicates:
            self.client.delete_run(run.info.run_id)
        return first

    def _remember(self, run: Run) -> None:
        """Note the run of a candidate; of duplicates, keep a complete one and delete the other."""
        tags, logged = run.data.tags, LoggedRun.of(run)
        key, recipe = (
            (tags["coldpress.model"], tags["coldpress.device_class"]),
            tags["coldpress.recipe"],
        )
        runs = self._runs.setdefault(key, {})
        duplicate = runs.get(recipe)
        if duplicate is not None:
            if duplicate.complete or not logged.complete:
                logged, duplicate = duplicate, logged
            self._delete(duplicate)
        runs[recipe] = logged


def _open_experiment(client: MlflowClient, tracking_uri: str) -> str:
    """Find or create the experiment of all campaigns, and return its id.

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
            client.create_experiment(EXPERIMENT, artifact_location=location, tags={NOTE: ABOUT})
        except MlflowException as error:  # another driver may create it at the same moment
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(EXPERIMENT)
    if found is None or found.lifecycle_stage != "active":
        raise InfrastructureError(
            f"MLflow's experiment {EXPERIMENT!r} at {tracking_uri} was deleted; restore it with"
            " `mlflow experiments restore -x ID` or remove it permanently with `mlflow gc`"
        )
    return str(found.experiment_id)
