"""Projection of a campaign to MLflow: a parent run for the campaign, a run for every candidate, a
summary.

Every step can be repeated by this driver, by the next one after a crash, or by a replay: a run with
the outcome's digest is left alone, a run with another digest is replaced. The ledger's lock ensures
that one process writes for a campaign at a time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.records import Outcome
from pipeline.tracking import plots
from pipeline.tracking.campaign_summary import (
    campaign_metrics,
    catalog_dataset,
    outcomes_digest,
    recipes_parameter,
    summary_digest,
    summary_table,
)
from pipeline.tracking.connection import connect, one_transaction, quoted, reaching, resolve, upload
from pipeline.tracking.descriptions import campaign_description
from pipeline.tracking.experiment import NOTE, open_experiment
from pipeline.tracking.run_records import OUTCOME, RunRecord, run_records

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARENT = "mlflow.parentRunId"
LOGGED_TABLES = "mlflow.loggedArtifacts"
"""Tag that lists a run's tables for MLflow's pages and `mlflow.load_table`."""

SUMMARY, REPORT = "summary.json", "report.html"
SHOWN = "coldpress.summary"
"""Tag with the digest of the summary's contents."""

COMPLETE = "coldpress.outcomes"
"""Tag with the digest of the outcomes that are completely logged and registered; empty while
outcomes are being logged.
"""

MAX_OUTPUTS = 50
"""Logged models that a campaign's run lists as its outputs; MLflow's page reads each of them."""

PAGE_SIZE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """Existing run of a candidate.

    Attributes:
        digest: digest of the record it was created for.
        started_ms: timestamp of all its metrics; logging a metric again with the same timestamp
            changes nothing.
        artifact_uri: where its files are stored.
        complete: whether everything was logged.
    """

    run_id: str
    digest: str
    started_ms: int
    artifact_uri: str
    complete: bool

    @classmethod
    def of(cls, run: Run) -> LoggedRun:
        """Read one from MLflow's record."""
        return cls(
            run_id=run.info.run_id,
            digest=run.data.tags[OUTCOME],
            started_ms=run.info.start_time,
            artifact_uri=run.info.artifact_uri,
            complete=run.info.status != "RUNNING",
        )


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
        self._parent, self._parameters = "", dict[str, str]()
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
            experiment_id = open_experiment(client, uri)
        return cls(client=client, experiment_id=experiment_id, tracking_uri=uri, campaign=campaign)

    def start(
        self,
        catalog: str,
        started: float,
        *,
        parameters: Mapping[str, str] | None = None,
        resume: bool = True,
        expected: str | None = None,
        models: Sequence[str] | None = None,
    ) -> str:
        """Find or create the campaign's parent run, and find the runs of its candidates.

        Args:
            catalog: description of the catalog for people.
            started: seconds since the epoch.
            parameters: versions and other settings of the campaign.
            resume: whether to set a parent run that has ended to running.
            expected: `outcomes_digest` of a campaign that has no work left. If the parent run's
                COMPLETE tag matches it, the runs of candidates are not searched.
            models: whose outcomes will be logged; None for all.

        Returns:
            The id of the parent run.
        """
        self._parameters = {"catalog": catalog, **(parameters or {})}
        with reaching(self.tracking_uri):
            parents = self._find("campaign")
            self.is_complete = expected is not None and [
                run.data.tags.get(COMPLETE) for run in parents
            ] == [expected]
            candidates = [] if self.is_complete else self._candidates(models)
            run = self._only_parent(
                parents, {item.data.tags.get(PARENT, "") for item in candidates}
            )
            self.is_resumed = run is not None
            if run is None:
                tags = {
                    "coldpress.campaign": self.campaign,
                    "coldpress.kind": "campaign",
                    "coldpress.catalog": catalog,
                }
                run = self.client.create_run(
                    self.experiment_id,
                    start_time=int(started * 1000),
                    tags=tags,
                    run_name=f"campaign {self.campaign}",
                )
                self._log_batch(run.info.run_id, {}, self._parameters, {}, 0)
            else:
                if not self.is_complete and run.data.tags.get(COMPLETE):
                    self.client.set_tag(run.info.run_id, COMPLETE, "")
                if resume and run.info.status != "RUNNING":
                    self.client.update_run(run.info.run_id, status="RUNNING")
            self._runs = {}
            for item in candidates:
                self._remember(item)
        self._parent = str(run.info.run_id)
        return self._parent

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
        self,
        outcomes: Sequence[Outcome],
        exit_code: int,
        interrupted: bool,
        *,
        finished: float | None = None,
        complete: bool = False,
        page: bytes = b"",
    ) -> None:
        """Write the campaign's description, summary, figures and counts, and end its run.

        Does nothing if it ended with this summary already.

        Args:
            outcomes: all outcomes of the campaign, in the order to show.
            exit_code: exit code of the campaign; 0 and 1 end the run as FINISHED, others as FAILED.
            interrupted: whether the campaign was interrupted; ends the run as KILLED.
            finished: seconds since the epoch; None means now.
            complete: whether every outcome was completely logged and registered.
            page: HTML report of the campaign; empty for none.
        """
        ended_ms = int((time.time() if finished is None else finished) * 1000)
        shown = summary_digest(outcomes, exit_code, interrupted, ended_ms)
        tags = {
            "coldpress.exit_code": str(exit_code),
            "coldpress.interrupted": str(interrupted).lower(),
            LOGGED_TABLES: json.dumps([{"path": SUMMARY, "type": "table"}]),
            COMPLETE: outcomes_digest(outcomes) if complete else "",
            SHOWN: shown,
            NOTE: campaign_description(outcomes, self._parameters),
        }
        with reaching(self.tracking_uri):
            run = self.client.get_run(self._parent)
            if run.data.tags.get(SHOWN) == shown and run.info.status != "RUNNING":
                if run.data.tags.get(COMPLETE, "") != tags[COMPLETE]:
                    self.client.set_tag(self._parent, COMPLETE, tags[COMPLETE])
                return
            table = summary_table(outcomes)
            files: dict[str, Callable[[Path], object]] = {
                SUMMARY: lambda path: path.write_text(table)
            }
            if not self.is_complete:  # otherwise the figures exist and are the same
                files |= {
                    "speedups.png": plots.speedups(outcomes).savefig,
                    "drift.png": plots.drift(outcomes).savefig,
                }
            if page:
                files[REPORT] = lambda path: path.write_bytes(page)
            self._upload(run.info.artifact_uri, files)
            changed = _changed_metrics(run.data.metrics, campaign_metrics(outcomes))
            # A parameter cannot be changed: it has the value of the campaign's first pass, the
            # description that of the last one.
            parameters = {**self._parameters, **recipes_parameter(outcomes)}
            missing = {
                name: text for name, text in parameters.items() if name not in run.data.params
            }
            self._log_batch(self._parent, changed, missing, tags, ended_ms)
            self._log_lineage(run, outcomes)
            status = "KILLED" if interrupted else "FINISHED" if exit_code in (0, 1) else "FAILED"
            self.client.set_terminated(self._parent, status=status, end_time=ended_ms)
        self.num_written += 1

    def _log_lineage(self, run: Run, outcomes: Sequence[Outcome]) -> None:
        """Log the catalog as the campaign's input, and the models that it registered as its
        outputs.
        """
        from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput

        context = [InputTag("mlflow.data.context", "catalog")]
        self.client.log_inputs(
            self._parent,
            [DatasetInput(catalog_dataset(self._parameters["catalog"], outcomes), context)],
        )
        if self.is_complete:
            return
        listed = {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()
        wanted = f"tags.`coldpress.campaign` = {quoted(self.campaign)}"
        found = self.client.search_logged_models(
            [self.experiment_id], wanted, max_results=MAX_OUTPUTS
        )
        added = [
            LoggedModelOutput(model.model_id, 0) for model in found if model.model_id not in listed
        ]
        if added:
            self.client.log_outputs(self._parent, added)

    def _log_record(self, record: RunRecord, known: LoggedRun | None, ended: float) -> LoggedRun:
        if known is not None and known.digest != record.digest:
            self._delete(known)
            known = None
        if known is not None and known.complete:
            return known
        self.num_written += 1
        with one_transaction(self.client):
            if known is None:
                started_ms = int((ended - record.duration_s) * 1000)
                tags = {**record.tags, PARENT: self._parent}
                run = self.client.create_run(
                    self.experiment_id, start_time=started_ms, tags=tags, run_name=record.name
                )
                known = LoggedRun.of(run)
            self._log_batch(
                known.run_id,
                record.metrics,
                record.params,
                {},
                known.started_ms,
                series=record.series,
            )
            if not record.texts:
                self._end(known, record)
        if record.texts:
            writers = {
                name: lambda path, text=text: path.write_text(text)
                for name, text in record.texts.items()
            }
            self._upload(known.artifact_uri, writers)
            self._end(known, record)
        return replace(known, complete=True)

    def _end(self, run: LoggedRun, record: RunRecord) -> None:
        ended_ms = run.started_ms + int(record.duration_s * 1000)
        self.client.set_terminated(run.run_id, status=record.status, end_time=ended_ms)

    def _delete(self, run: LoggedRun) -> None:
        self.client.delete_run(run.run_id)
        self.num_written += 1

    def _upload(self, artifact_uri: str, files: Mapping[str, Callable[[Path], object]]) -> None:
        """Write files, each by a function of its path, and upload them."""
        with tempfile.TemporaryDirectory(prefix="coldpress-") as folder:
            for name, write in files.items():
                write(Path(folder, name))
            upload(self.client, artifact_uri, Path(folder))

    def _log_batch(
        self,
        run_id: str,
        metrics: Mapping[str, float],
        params: Mapping[str, str],
        tags: Mapping[str, str],
        timestamp_ms: int,
        *,
        series: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        steps = {**{name: {0: value} for name, value in metrics.items()}, **(series or {})}
        self.client.log_batch(
            run_id,
            metrics=[
                Metric(name, value, timestamp_ms, step)
                for name, values in steps.items()
                for step, value in values.items()
            ],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _candidates(self, models: Sequence[str] | None) -> list[Run]:
        """Return the runs of candidates, of some models or all."""
        if models is None:
            return self._find("candidate")
        return [
            run
            for model in models
            for run in self._find("candidate", f" AND tags.`coldpress.model` = '{model}'")
        ]

    def _find(self, kind: str, more: str = "") -> list[Run]:
        """Return the campaign's runs of one kind, oldest first; `more` is a further condition."""
        wanted = (
            f"tags.`coldpress.campaign` = {quoted(self.campaign)} AND tags.`coldpress.kind` ="
            f" '{kind}'{more}"
        )
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id],
                wanted,
                max_results=PAGE_SIZE,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    def _only_parent(self, parents: Sequence[Run], named: set[str]) -> Run | None:
        """Return the parent run that candidates name; delete duplicates that a server left when it
        died during a request.
        """
        found = sorted(parents, key=lambda run: run.info.run_id not in named)
        for other in found[1:]:
            self.client.delete_run(other.info.run_id)
        return found[0] if found else None

    def _remember(self, run: Run) -> None:
        """Note the run of a candidate; of duplicates, keep a complete one and delete the other."""
        tags, logged = run.data.tags, LoggedRun.of(run)
        runs, recipe = (
            self._runs.setdefault((tags["coldpress.model"], tags["coldpress.device_class"]), {}),
            tags["coldpress.recipe"],
        )
        known = runs.setdefault(recipe, logged)
        if known is not logged:
            kept, other = (
                (logged, known) if logged.complete and not known.complete else (known, logged)
            )
            runs[recipe] = kept
            self._delete(other)


def _changed_metrics(shown: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that differ from those shown; the count of a verdict that no outcome has
    any more becomes 0.
    """
    wanted = {**{name: 0.0 for name in shown if name.startswith("outcomes/")}, **metrics}
    return {name: value for name, value in wanted.items() if shown.get(name) != value}
