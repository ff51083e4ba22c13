"""Tracker: writes a campaign's final outcomes to MLflow, and stops writing when MLflow cannot be
reached.

The ledger is written first; `coldpress replay` brings MLflow up to date from it, with this class.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.artifact import Artifact, torch_folder
from freezer.errors import (
    INTERRUPTED,
    InfrastructureError,
    IntegrityError,
    NotPublishedError,
    without_credentials,
)
from freezer.hardware import DEVICE_CLASSES
from freezer.store import Store, Version
from pipeline.ledger import CampaignRecord, History, Reached, campaign_lock
from pipeline.records import Note, Outcome, Outcomes
from pipeline.tracking.registry import ArtifactMode, Registration

if TYPE_CHECKING:
    from pipeline.tracking.projection import Projection

RACED = ("UNIQUE constraint failed", "UniqueViolation", "Duplicate entry")
"""Errors of sqlite, PostgreSQL and MySQL for a row that another driver has just inserted."""


class Tracker:
    """MLflow for one campaign.

    Args:
        tracking_uri: URI of MLflow.
        campaign: name.
        store: store of the published artifacts.
        mode: whether MLflow stores whole artifacts, or references to the store.

    Attributes:
        failures: errors, one sentence each. A damaged artifact concerns its own outcome alone.
        broke_off: whether MLflow could not be reached; nothing more is tried then.
        notes: outcomes that are shown without their artifact, because the store lacks it.
        num_logged: outcomes that MLflow shows.
        experiment_id: experiment of all campaigns; empty before `start`.
    """

    def __init__(
        self,
        tracking_uri: str,
        campaign: str,
        store: Store,
        *,
        mode: ArtifactMode,
    ) -> None:
        self._uri, self._campaign, self._store, self._mode = tracking_uri, campaign, store, mode
        self._projection: Projection | None = None
        self.failures: list[str] = []
        self.broke_off = False
        self.notes: list[str] = []
        self.num_logged = 0
        self.experiment_id = ""

    def start(self, record: CampaignRecord, expected: str | None = None) -> None:
        """Connect to MLflow and open the campaign's parent run; see `Projection.start`."""

        def opened() -> None:
            from pipeline.tracking.projection import Projection  # mlflow takes 2 s to import

            projection = Projection(self._uri, self._campaign)
            projection.start(record, expected)
            self._projection = projection
            self.experiment_id = projection.experiment_id

        self._tried(opened)

    @property
    def is_complete(self) -> bool:
        """Whether MLflow shows everything that `start` expected."""
        return self._projection is not None and self._projection.is_complete

    def log(self, outcomes: Outcomes, reached: float | None = None) -> None:
        """Log the final outcomes of one model, and register its artifacts. Repeating it changes
        nothing.

        Args:
            outcomes: outcomes of one model.
            reached: seconds since the epoch; None means now.
        """
        if self.is_complete:
            return
        # portable first: classes that keep eager refer to it, and the newest version should be the
        # best class's, as models:/NAME/latest takes it
        ranks = {name: rank for rank, name in enumerate(DEVICE_CLASSES)}
        for outcome in sorted(outcomes, key=lambda one: ranks.get(one.device_class, len(ranks))):
            projection = self._projection
            if projection is not None and self._tried(
                partial(self._log, projection, outcome, reached)
            ):
                self.num_logged += 1

    def finish(self, outcomes: Outcomes, record: CampaignRecord, page: bytes = b"") -> None:
        """Write the summary and the report, and end the parent run; see `Projection.finish`."""
        projection = self._projection
        if projection is not None:
            complete = not self.failures and not self.notes and not record.interrupted
            self._tried(lambda: projection.finish(outcomes, record, page, complete=complete))

    def _log(
        self,
        projection: Projection,
        outcome: Outcome,
        reached: float | None,
    ) -> None:
        """Log and register one outcome."""
        published = self._published(outcome)
        run_id = projection.log_outcome(outcome, reached=reached)
        if published is None:
            return
        version, serving = published

        def lay_out(folder: Path) -> Artifact:
            if len(version.images_of(serving)) > 1:
                self._store.materialize(
                    version,
                    serving,
                    torch_folder(folder),
                    rank=1,
                )
            return self._store.materialize(version, serving, folder)

        Registration(
            projection=projection,
            outcome=outcome,
            serving=serving,
            mode=self._mode,
            store_uri=self._store.uri,
            lay_out=lay_out,
            rolled_back=partial(self._rolled_back, outcome, serving),
            run_id=run_id,
        ).register()

    def _published(self, outcome: Outcome) -> tuple[Version, str] | None:
        """Return the version that contains an outcome's artifact, and the artifact's device
        class.
        """
        if outcome.artifact is None or outcome.version is None:
            return None
        try:
            version = self._store.version(outcome.reference)
        except NotPublishedError as error:
            self.notes.append(
                f"{outcome.model} for {outcome.device_class} is shown without its artifact: {error}"
            )
            return None
        serving = [
            name for name, image in version.images.items() if image.digest == outcome.artifact
        ]
        if not serving:
            raise IntegrityError(
                f"{outcome.model}:{outcome.version} does not contain {outcome.artifact}, which the"
                " ledger recorded for it"
            )
        return version, serving[0]

    def _rolled_back(self, outcome: Outcome, serving: str) -> bool:
        """Whether the store serves an older artifact; a later version may still carry one that was
        rolled back to.
        """
        latest = self._store.version(outcome.model)
        served = latest.images.get(serving)
        if served is not None and served.digest == outcome.artifact:
            return False
        if latest.number < (outcome.version or 0):
            return True
        if served is None:
            return False
        version = self._store.version(outcome.reference)
        serves_from, made_in = (
            self._store.manifest(found, serving).version or 0 for found in (latest, version)
        )
        return serves_from < made_in

    def _tried(self, call: Callable[[], None]) -> bool:
        """Return whether a call succeeded; otherwise record its failure."""
        try:
            _repeated_if_raced(call)
        except IntegrityError as error:
            self.failures.append(f"MLflow is incomplete: {error}")
            return False
        except InfrastructureError as error:
            self._projection, self.broke_off = None, True
            again = replay_command(self._uri, self._campaign, self._store.uri, self._mode)
            self.failures.append(
                f"MLflow: {error}; the store and the ledger are complete, and `{again}` brings"
                " MLflow up to date"
            )
            return False
        return True


def _repeated_if_raced(call: Callable[[], None]) -> None:
    """Repeat a call if another driver inserted the same alias or tag at the same moment: MLflow
    reads a row, then inserts it.
    """
    try:
        call()
    except InfrastructureError as error:
        if not any(words in str(error) for words in RACED):
            raise
        call()


def replay_command(
    tracking_uri: str,
    campaign: str,
    store: str,
    mode: ArtifactMode,
) -> str:
    """Return the shell command that brings MLflow up to date with a campaign, without the user
    and password of the URI.
    """
    uri = without_credentials(tracking_uri)
    words = ["coldpress", "replay", campaign, "--store", store, "--tracking-uri", uri]
    return shlex.join([*words, *(("--mlflow-artifacts", mode) if mode != "copy" else ())])


Page = Callable[[Store, str], bytes]
"""Makes the HTML report of a campaign in a store."""


def replay(
    store: Store,
    tracking_uri: str,
    campaign: str | None,
    *,
    mode: ArtifactMode,
    page: Page,
    say: Note,
) -> list[str]:
    """Log the outcomes that MLflow does not show, of one campaign or of all, oldest first;
    return errors, one sentence each.

    Args:
        store, tracking_uri: of the campaigns, whose ledger is only read, and of MLflow.
        campaign: name of the campaign; None means all that are not running.
        mode: whether MLflow stores whole artifacts, or references.
        page, say: make the report of a campaign, and take messages.

    Raises:
        UsageError: the store has no such campaign; the message lists existing ones.
        InfrastructureError, StoreUnreachableError: it is running, or the ledger cannot be read.
    """
    history = History(store)
    names = history.campaigns()
    if campaign is not None:
        history.record(campaign)
        names = [campaign]
    failures = []
    for name in names:
        try:
            tracker = _replay_one(store, tracking_uri, name, mode=mode, page=page, say=say)
        except InfrastructureError as error:
            if campaign is not None:
                raise
            say(f"campaign {name} is skipped: {error}")
            continue
        failures += tracker.failures
        if tracker.broke_off:
            break
    return failures


def _replay_one(
    store: Store,
    tracking_uri: str,
    campaign: str,
    *,
    mode: ArtifactMode,
    page: Page,
    say: Note,
) -> Tracker:
    with campaign_lock(store, campaign, say):
        history = History(store)  # what its driver wrote before it ended
        record = history.record(campaign)
        members = history.members(campaign, record)
        models: dict[str, list[Reached]] = {}
        for item in (*history.others(campaign, record), *members):
            models.setdefault(item.outcome.model, []).append(item)
        tracker = Tracker(tracking_uri, campaign, store, mode=mode)
        tracker.start(record)
        for reached in models.values():
            outcomes = [item.outcome for item in reached]
            tracker.log(outcomes, max(item.time for item in reached))
        if record.finished is None:  # its driver was killed
            ended = max([record.started, *(item.time for item in members)])
            record = replace(record, finished=ended, exit_code=INTERRUPTED, interrupted=True)
        outcomes = [*(item.outcome for item in members), *record.problems]
        tracker.finish(outcomes, record, page(store, campaign))
    say(f"campaign {campaign}: MLflow shows {tracker.num_logged} outcomes")
    for line in (*tracker.notes, *tracker.failures):
        say(line)
    return tracker
