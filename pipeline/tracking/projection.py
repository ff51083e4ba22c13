"""The projection of a campaign to MLflow: a parent run for the campaign, a run for every candidate, a summary.

    open         the server or database answers, the experiment exists
    start        the parent run, and what an earlier driver of this campaign has logged already
    log_outcome  a run for each candidate of one outcome
    finish       summary table, figures, counts, the end of the parent run

The ledger is the truth. Every step may be repeated, by this driver or by the next one after a crash: runs are found by their tags
before they are made, a run that shows what the outcome says is left alone, and one that shows something else is replaced.
One driver writes for a campaign at a time (the ledger's lease sees to it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.errors import InfrastructureError
from pipeline.outcome import Outcome
from pipeline.tracking import figures
from pipeline.tracking.connection import connect, database_file, reaching, resolve
from pipeline.tracking.records import RunRecord, campaign_metrics, run_records, summary_markdown, summary_table

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "coldpress"
PARENT = "mlflow.parentRunId"
LOGGED_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow's pages and `mlflow.load_table` find tables."""

SUMMARY = "summary.json"
PAGE_SIZE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """A candidate's run that is there.

    Attributes:
        digest: of the record that it was made for.
        started_ms: the time that all its metrics bear, so that logging them again changes nothing.
        complete: whether everything was logged.
    """

    run_id: str
    digest: str
    started_ms: int
    complete: bool


class Projection:
    """A campaign as MLflow shows it.

    Every method raises InfrastructureError when MLflow cannot be reached or refuses; what was logged until then stays.

    Attributes:
        client: of the tracking server and registry; `registry.register` takes it.
        experiment_id: of the experiment that holds every campaign.
        tracking_uri: absolute.
        campaign: its name.
    """

    def __init__(self, *, client: MlflowClient, experiment_id: str, tracking_uri: str, campaign: str) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.tracking_uri = tracking_uri
        self.campaign = campaign
        self._parent: str | None = None
        self._runs: dict[tuple[str, str], dict[str, LoggedRun]] = {}

    @classmethod
    def open(cls, tracking_uri: str, campaign: str, *, experiment: str = EXPERIMENT) -> Projection:
        """The projection of one campaign; database and experiment are made if they do not exist.

        Args:
            tracking_uri: of a server, or `sqlite:///FILE`.
            campaign: its name.
            experiment: the MLflow experiment.

        Raises:
            InfrastructureError: nothing answers at the URI; told within some seconds.
            UsageError: the URI names a folder.
        """
        uri = resolve(tracking_uri)
        client = connect(uri)
        with reaching(uri):
            return cls(client=client, experiment_id=_experiment(client, uri, experiment), tracking_uri=uri, campaign=campaign)

    def start(self, catalog: str, started: float) -> str:
        """The id of the campaign's parent run, made if it does not exist, and running again if it had ended.

        Args:
            catalog: what was asked for, for people.
            started: seconds since the epoch.
        """
        with reaching(self.tracking_uri):
            found = self._find("campaign")
            if found:
                run = found[0]
                if run.info.status != "RUNNING":
                    self.client.update_run(run.info.run_id, status="RUNNING")
            else:
                tags = {"coldpress.campaign": self.campaign, "coldpress.kind": "campaign", "coldpress.catalog": catalog}
                run = self.client.create_run(
                    self.experiment_id, start_time=int(started * 1000), tags=tags, run_name=f"campaign {self.campaign}"
                )
            self._runs = {}
            for item in self._find("candidate"):
                self._remember(item)
        self._parent = str(run.info.run_id)
        return self._parent

    def log_outcome(self, outcome: Outcome, artifact: Artifact | None = None) -> str | None:
        """Log a run for each candidate, or one for an outcome without candidates.

        Args:
            outcome: of one model and device class; call it again when the outcome has changed.
            artifact: what was published for it, whose manifest goes to the run of its recipe.

        Returns:
            The id of the run of the outcome's recipe, which a registered model names as its origin; None where there is none.
        """
        parent = self._started()
        records = run_records(outcome, self.campaign, artifact.manifest if artifact else None)
        runs = self._runs.setdefault((outcome.model, outcome.device_class), {})
        with reaching(self.tracking_uri):
            for recipe in set(runs) - {record.recipe for record in records}:
                self.client.delete_run(runs.pop(recipe).run_id)
            for record in records:
                runs[record.recipe] = self._log_record(record, parent, runs.get(record.recipe))
        return runs[outcome.recipe].run_id if outcome.recipe in runs else None

    def finish(self, outcomes: Sequence[Outcome], exit_code: int, interrupted: bool) -> None:
        """Write the campaign's summary, figures and counts, and end its run.

        Args:
            outcomes: all of the campaign's, in the order to show.
            exit_code: of the campaign. A campaign whose models failed has finished; one that broke off for infrastructure failed.
            interrupted: whether it was stopped; it may be resumed.
        """
        parent = self._started()
        tags = {
            "coldpress.exit_code": str(exit_code),
            "coldpress.interrupted": str(interrupted).lower(),
            LOGGED_TABLES: json.dumps([{"path": SUMMARY, "type": "table"}]),
        }
        texts = {
            SUMMARY: summary_table(outcomes),  # not by log_table, which appends to what an earlier finish wrote
            "summary.md": summary_markdown(outcomes, self.campaign, exit_code=exit_code, interrupted=interrupted),
        }
        drawn = {"speedups.png": figures.speedups(outcomes), "drift.png": figures.drift(outcomes)}
        with reaching(self.tracking_uri):
            for path, text in texts.items():
                self.client.log_text(parent, text, path)
            for path, figure in drawn.items():
                self.client.log_figure(parent, figure, path)
            self._log_batch(parent, self._changed(parent, campaign_metrics(outcomes)), {}, tags, int(time.time() * 1000))
            status = "KILLED" if interrupted else "FINISHED" if exit_code in (0, 1) else "FAILED"
            self.client.set_terminated(parent, status=status)

    def _log_record(self, record: RunRecord, parent: str, known: LoggedRun | None) -> LoggedRun:
        if known is not None and known.digest != record.digest:
            self.client.delete_run(known.run_id)
            known = None
        if known is not None and known.complete:
            return known
        if known is None:
            started_ms = int((time.time() - record.duration_s) * 1000)
            tags = {**record.tags, PARENT: parent}
            run = self.client.create_run(self.experiment_id, start_time=started_ms, tags=tags, run_name=record.name)
            known = LoggedRun(run_id=run.info.run_id, digest=record.digest, started_ms=started_ms, complete=False)
        self._log_batch(known.run_id, record.metrics, record.params, {}, known.started_ms)
        for path, text in record.texts.items():
            self.client.log_text(known.run_id, text, path)
        ended_ms = known.started_ms + int(record.duration_s * 1000)
        self.client.set_terminated(known.run_id, status=record.status, end_time=ended_ms)
        return LoggedRun(run_id=known.run_id, digest=known.digest, started_ms=known.started_ms, complete=True)

    def _log_batch(
        self, run_id: str, metrics: Mapping[str, float], params: Mapping[str, str], tags: Mapping[str, str], timestamp_ms: int
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, timestamp_ms, 0) for name, value in metrics.items()],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _changed(self, run_id: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics whose value is another than the run shows; a verdict that no outcome has any more counts 0."""
        shown = self.client.get_run(run_id).data.metrics
        wanted = {**{name: 0.0 for name in shown if name.startswith("outcomes/")}, **metrics}
        return {name: value for name, value in wanted.items() if shown.get(name) != value}

    def _find(self, kind: str) -> list[Run]:
        """The campaign's runs of one kind, oldest first."""
        quote = '"' if "'" in self.campaign else "'"
        wanted = f"tags.`coldpress.campaign` = {quote}{self.campaign}{quote} AND tags.`coldpress.kind` = '{kind}'"
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], wanted, max_results=PAGE_SIZE, order_by=["attributes.start_time ASC"], page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found

    def _remember(self, run: Run) -> None:
        tags = run.data.tags
        runs = self._runs.setdefault((tags["coldpress.model"], tags["coldpress.device_class"]), {})
        runs[tags["coldpress.recipe"]] = LoggedRun(
            run_id=run.info.run_id,
            digest=tags["coldpress.outcome"],
            started_ms=run.info.start_time,
            complete=run.info.status != "RUNNING",
        )

    def _started(self) -> str:
        if self._parent is None:
            raise RuntimeError("the campaign has no parent run yet: call start first")
        return self._parent


def _experiment(client: MlflowClient, tracking_uri: str, name: str) -> str:
    """The id of the experiment, made if it does not exist. Another driver may make it at the same moment."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = database_file(tracking_uri)
        # Beside the database, not in the working directory of whoever comes first.
        location = None if path is None else (path.parent / "mlruns" / name).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise InfrastructureError(
            f"MLflow's experiment {name!r} at {tracking_uri} was deleted; restore it with `mlflow experiments restore -x ID`, "
            "or remove it for good with `mlflow gc`"
        )
    return str(found.experiment_id)
