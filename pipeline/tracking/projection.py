"""The projection of a campaign to MLflow: a parent run for the campaign, a run for every candidate, a summary.

    open         the server or database answers, the experiment exists
    start        the parent run, and what an earlier driver of this campaign has logged already
    log_outcome  a run for each candidate of one outcome
    finish       summary table, figures, counts, the end of the parent run

The ledger is the truth. Every step may be repeated, by this driver, by the next one after a crash, or by a replay: runs are found
by their tags before they are made, a run that shows what the outcome says is left alone, and one that shows something else is
replaced. One process writes for a campaign at a time (the ledger's lock sees to it).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freezer.artifact.manifest import Manifest
from freezer.errors import InfrastructureError
from pipeline.records.outcome import Outcome
from pipeline.tracking import plots
from pipeline.tracking.connection import connect, database_file, reaching, resolve
from pipeline.tracking.run_records import RunRecord, campaign_metrics, run_records, summary_markdown, summary_table

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "coldpress"
PARENT = "mlflow.parentRunId"
LOGGED_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow's pages and `mlflow.load_table` find tables."""

SUMMARY = "summary.json"
SHOWN = "coldpress.summary"
"""The tag with the digest of all that the summary was made of."""

COMPLETE = "coldpress.outcomes"
"""The tag with the digest of the outcomes of which everything was logged and registered; empty while something is logged."""

FORM = 1
"""Of what is logged for an outcome. Where it grows, no earlier COMPLETE holds any more."""

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
        num_written: runs that were made, completed or replaced; what was there already does not count.
        is_complete: whether everything that the campaign has was logged and registered by an earlier driver, as that said.
    """

    def __init__(self, *, client: MlflowClient, experiment_id: str, tracking_uri: str, campaign: str) -> None:
        self.client = client
        self.experiment_id = experiment_id
        self.tracking_uri = tracking_uri
        self.campaign = campaign
        self.num_written = 0
        self.is_complete = False
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

    def start(self, catalog: str, started: float, *, resume: bool = True, expected: str | None = None) -> str:
        """The id of the campaign's parent run, made if it does not exist.

        Args:
            catalog: what was asked for, for people.
            started: seconds since the epoch.
            resume: whether the campaign goes on: a parent run that had ended runs again.
            expected: `outcomes_digest` of a campaign that has nothing left to do; where MLflow was told all of these, the runs of
                its candidates are not looked at.
        """
        with reaching(self.tracking_uri):
            parents = self._find("campaign")
            self.is_complete = expected is not None and [run.data.tags.get(COMPLETE) for run in parents] == [expected]
            candidates = [] if self.is_complete else self._find("candidate")
            run = self._only_parent(parents, {item.data.tags.get(PARENT, "") for item in candidates})
            if run is None:
                tags = {"coldpress.campaign": self.campaign, "coldpress.kind": "campaign", "coldpress.catalog": catalog}
                run = self.client.create_run(
                    self.experiment_id, start_time=int(started * 1000), tags=tags, run_name=f"campaign {self.campaign}"
                )
            else:
                if not self.is_complete and run.data.tags.get(COMPLETE):
                    self.client.set_tag(run.info.run_id, COMPLETE, "")  # what is logged from here on makes it untrue until the end
                if resume and run.info.status != "RUNNING":
                    self.client.update_run(run.info.run_id, status="RUNNING")
            self._runs = {}
            for item in candidates:
                self._remember(item)
        self._parent = str(run.info.run_id)
        return self._parent

    def log_outcome(self, outcome: Outcome, manifest: Manifest | None = None, *, reached: float | None = None) -> str | None:
        """Log a run for each candidate, or one for an outcome without candidates.

        Args:
            outcome: of one model and device class; call it again when the outcome has changed.
            manifest: of what was published for it, which goes to the run of its recipe.
            reached: seconds since the epoch; None means now.

        Returns:
            The id of the run of the outcome's recipe, which a registered model names as its origin; None where there is none.
        """
        parent = self._started()
        records = run_records(outcome, self.campaign, manifest)
        ended = time.time() if reached is None else reached
        runs = self._runs.setdefault((outcome.model, outcome.device_class), {})
        with reaching(self.tracking_uri):
            for recipe in set(runs) - {record.recipe for record in records}:
                self._delete(runs.pop(recipe))
            for record in records:
                runs[record.recipe] = self._log_record(record, parent, runs.get(record.recipe), ended)
        return runs[outcome.recipe].run_id if outcome.recipe in runs else None

    def finish(
        self,
        outcomes: Sequence[Outcome],
        exit_code: int,
        interrupted: bool,
        *,
        finished: float | None = None,
        complete: bool = False,
    ) -> None:
        """Write the campaign's summary, figures and counts, and end its run; one that has ended with this summary is left alone.

        Args:
            outcomes: all of the campaign's, in the order to show.
            exit_code: of the campaign. A campaign whose models failed has finished; one that broke off for infrastructure failed.
            interrupted: whether it was stopped; it may be resumed.
            finished: seconds since the epoch; None means now.
            complete: whether everything of every outcome was logged and registered.
        """
        parent = self._started()
        ended_ms = int((time.time() if finished is None else finished) * 1000)
        shown = _digest_of(outcomes, exit_code, interrupted, ended_ms)
        tags = {
            "coldpress.exit_code": str(exit_code),
            "coldpress.interrupted": str(interrupted).lower(),
            LOGGED_TABLES: json.dumps([{"path": SUMMARY, "type": "table"}]),
            COMPLETE: outcomes_digest(outcomes) if complete else "",
            SHOWN: shown,  # with the last step but one: a summary that broke off is written again
        }
        texts = {
            SUMMARY: summary_table(outcomes),  # not by log_table, which appends to what an earlier finish wrote
            "summary.md": summary_markdown(outcomes, self.campaign, exit_code=exit_code, interrupted=interrupted),
        }
        with reaching(self.tracking_uri):
            run = self.client.get_run(parent)
            if run.data.tags.get(SHOWN) == shown and run.info.status != "RUNNING":
                if run.data.tags.get(COMPLETE, "") != tags[COMPLETE]:
                    self.client.set_tag(parent, COMPLETE, tags[COMPLETE])
                return
            for path, text in texts.items():
                self.client.log_text(parent, text, path)
            if not self.is_complete:  # else they are there: nothing in them has changed
                for path, figure in {"speedups.png": plots.speedups(outcomes), "drift.png": plots.drift(outcomes)}.items():
                    self.client.log_figure(parent, figure, path)
            changed = _changed(run.data.metrics, campaign_metrics(outcomes))
            self._log_batch(parent, changed, {}, tags, ended_ms)
            status = "KILLED" if interrupted else "FINISHED" if exit_code in (0, 1) else "FAILED"
            self.client.set_terminated(parent, status=status, end_time=ended_ms)
        self.num_written += 1

    def _log_record(self, record: RunRecord, parent: str, known: LoggedRun | None, ended: float) -> LoggedRun:
        if known is not None and known.digest != record.digest:
            self._delete(known)
            known = None
        if known is not None and known.complete:
            return known
        self.num_written += 1
        if known is None:
            started_ms = int((ended - record.duration_s) * 1000)
            tags = {**record.tags, PARENT: parent}
            run = self.client.create_run(self.experiment_id, start_time=started_ms, tags=tags, run_name=record.name)
            known = LoggedRun(run_id=run.info.run_id, digest=record.digest, started_ms=started_ms, complete=False)
        self._log_batch(known.run_id, record.metrics, record.params, {}, known.started_ms)
        for path, text in record.texts.items():
            self.client.log_text(known.run_id, text, path)
        ended_ms = known.started_ms + int(record.duration_s * 1000)
        self.client.set_terminated(known.run_id, status=record.status, end_time=ended_ms)
        return LoggedRun(run_id=known.run_id, digest=known.digest, started_ms=known.started_ms, complete=True)

    def _delete(self, run: LoggedRun) -> None:
        self.client.delete_run(run.run_id)
        self.num_written += 1

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

    def _only_parent(self, parents: Sequence[Run], named: set[str]) -> Run | None:
        """The campaign's parent run, the one that candidates name; a second one is deleted, see _remember."""
        found = sorted(parents, key=lambda run: run.info.run_id not in named)
        for other in found[1:]:
            self.client.delete_run(other.info.run_id)
        return found[0] if found else None

    def _remember(self, run: Run) -> None:
        """Take note of a run; a second one of a candidate, which a server that died under a request can leave, is deleted."""
        tags = run.data.tags
        runs = self._runs.setdefault((tags["coldpress.model"], tags["coldpress.device_class"]), {})
        logged = LoggedRun(
            run_id=run.info.run_id,
            digest=tags["coldpress.outcome"],
            started_ms=run.info.start_time,
            complete=run.info.status != "RUNNING",
        )
        recipe = tags["coldpress.recipe"]
        known = runs.setdefault(recipe, logged)
        if known is not logged:
            kept, other = (logged, known) if logged.complete and not known.complete else (known, logged)
            runs[recipe] = kept
            self._delete(other)

    def _started(self) -> str:
        if self._parent is None:
            raise RuntimeError("the campaign has no parent run yet: call start first")
        return self._parent


def outcomes_digest(outcomes: Iterable[Outcome]) -> str:
    """Of what is logged and registered for outcomes, whether they are cached or not; those of bad entries do not count."""
    digest = hashlib.sha256(str(FORM).encode())
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.model, outcome.device_class)):
        if outcome.judge_key:
            shown = {**outcome.for_json_report(), "cached": False}
            facts = [shown, outcome.judge_key, outcome.registered_as, sorted(outcome.tags.items())]
            digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _digest_of(outcomes: Sequence[Outcome], *of_the_end: object) -> str:
    """Of all that the summary says."""
    digest = hashlib.sha256(repr(of_the_end).encode())
    for outcome in outcomes:
        digest.update(json.dumps(outcome.for_json_report(), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _changed(shown: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics whose value is another than a run shows; a verdict that no outcome has any more counts 0."""
    wanted = {**{name: 0.0 for name in shown if name.startswith("outcomes/")}, **metrics}
    return {name: value for name, value in wanted.items() if shown.get(name) != value}


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
