"""The tracker: shows a campaign's final outcomes in MLflow, and goes on without MLflow when it cannot be reached.

The ledger is the truth and is written first; `jobs.replay` brings MLflow up to date from it, with this same class.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from freezer.artifact.manifest import Manifest
from freezer.errors import InfrastructureError, IntegrityError, NotPublishedError
from freezer.store.store import Store, Version
from pipeline.records.outcome import Outcome
from pipeline.tracking.connection import without_password
from pipeline.workspace.staging import temporary_folder, temporary_place

if TYPE_CHECKING:
    from pipeline.tracking.projection import Projection

T = TypeVar("T")
ArtifactMode = Literal["copy", "reference"]


class Tracker:
    """MLflow for one campaign.

    Args:
        tracking_uri: of MLflow.
        campaign: its name.
        store: where published artifacts are.
        mode: whether MLflow holds whole artifacts, or references to the store.

    Attributes:
        failures: what went wrong, one sentence each. When MLflow cannot be reached, nothing more is tried; a damaged artifact
            concerns its own outcome alone.
        broke_off: MLflow could not be reached.
        notes: what the store does not hold any more, and MLflow cannot show therefore.
        num_logged, num_unchanged: outcomes that something was written for, and those that MLflow showed already.
    """

    def __init__(self, tracking_uri: str, campaign: str, store: Store, *, mode: ArtifactMode) -> None:
        self._uri, self._campaign, self._store, self._mode = tracking_uri, campaign, store, mode
        self._projection: Projection | None = None
        self.failures: list[str] = []
        self.broke_off = False
        self.notes: list[str] = []
        self.num_logged = self.num_unchanged = 0

    def start(self, catalog: str, started: float, *, resume: bool = True, expected: str | None = None) -> None:
        """Open MLflow and the campaign's parent run.

        Args:
            catalog: what was asked for, for people.
            started: seconds since the epoch.
            resume: whether the campaign goes on, and is not only shown.
            expected: `projection.outcomes_digest` of a campaign with nothing left to do. Where its last driver could log all of
                that, nothing is looked at again; a replay does so.
        """

        def opened() -> Projection:
            from pipeline.tracking.projection import Projection  # mlflow takes two seconds to import

            projection = Projection.open(self._uri, self._campaign)
            projection.start(catalog, started, resume=resume, expected=expected)
            return projection

        self._projection = self._tried(opened)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to log: MLflow was told all that `start` expected."""
        return self._projection is not None and self._projection.is_complete

    def log(self, outcomes: Sequence[Outcome], *, reached: float | None = None) -> None:
        """Log the final outcomes of one model, and register what is published. Doing it again changes nothing.

        Args:
            outcomes: of one model.
            reached: seconds since the epoch; None means now.
        """
        for outcome in sorted(outcomes, key=lambda outcome: outcome.verdict == "kept-eager"):
            projection = self._projection
            if projection is None or self.is_complete:
                return
            changed = self._tried(lambda outcome=outcome, at=projection: self._log(at, outcome, reached))  # type: ignore[misc]
            self.num_logged += changed is True
            self.num_unchanged += changed is False

    def finish(self, outcomes: Sequence[Outcome], exit_code: int, *, interrupted: bool, finished: float | None = None) -> None:
        """Write the summary and the figures, and end the parent run.

        Args:
            outcomes: all of the campaign's, in the order to show.
            exit_code: of the campaign.
            interrupted: whether it was stopped.
            finished: seconds since the epoch; None means now.
        """
        projection = self._projection
        if projection is not None:
            complete = not self.failures and not self.notes and not interrupted
            self._tried(lambda: projection.finish(outcomes, exit_code, interrupted, finished=finished, complete=complete))

    def _log(self, projection: Projection, outcome: Outcome, reached: float | None) -> bool:
        """Log one outcome and register what serves its class; whether anything was missing."""
        before = projection.num_written
        version, serving = self._published(outcome)
        manifest: Manifest | None = None
        if version is not None and outcome.verdict == "published":
            manifest = self._store.manifest(version, serving)
        run_id = projection.log_outcome(outcome, manifest, reached=reached)
        registered = version is not None and self._register(projection, outcome, version, serving, run_id)
        return registered or projection.num_written > before

    def _published(self, outcome: Outcome) -> tuple[Version | None, str]:
        """The version that holds an outcome's artifact, and the class that the artifact was made for."""
        if outcome.artifact is None or outcome.version is None:
            return None, ""
        try:
            version = self._store.version(f"{outcome.model}:{outcome.version}")
        except NotPublishedError as error:
            self.notes.append(f"{outcome.model} for {outcome.device_class} is shown without its artifact: {error}")
            return None, ""
        # Its own class; where eager is kept, portable.
        serving = [name for name, image in version.images.items() if image["digest"] == outcome.artifact]
        if not serving:
            raise IntegrityError(
                f"{outcome.model}:{outcome.version} does not hold {outcome.artifact}, which the ledger says it does"
            )
        return version, serving[0]

    def _register(self, projection: Projection, outcome: Outcome, version: Version, serving: str, run_id: str | None) -> bool:
        from pipeline.tracking import registry

        changed = registry.alias(projection.client, outcome)
        if changed is not None:
            return changed
        try:
            with temporary_folder() as scratch:
                registry.register(
                    projection.client,
                    projection.experiment_id,
                    outcome,
                    self._store.materialize(version, serving, scratch),
                    run_id=run_id,
                    mode=self._mode,
                    store_uri=self._store.uri,
                    campaign=self._campaign,
                )
        except OSError as error:  # what MLflow or the store's disk raises is an error of ours already
            raise InfrastructureError(
                f"no artifact can be laid out in the temporary folder {temporary_place()} ({error}); make room "
                "there, or name another with TMPDIR",
                code="CP-TEMPORARY",
            ) from error
        return True

    def _tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except IntegrityError as error:
            self.failures.append(f"MLflow does not show everything: {error}")
        except InfrastructureError as error:
            self._projection, self.broke_off = None, True
            self.failures.append(
                f"MLflow: {error}; the store and the ledger are complete, and `{self._replay()}` brings MLflow up to date"
            )
        return None

    def _replay(self) -> str:
        return replay_command(self._uri, self._campaign, self._store.uri, self._mode)


def replay_command(tracking_uri: str, campaign: str, store: str, mode: ArtifactMode) -> str:
    """What brings MLflow up to date with a campaign, as a person types it; without the password of its URI."""
    uri = without_password(tracking_uri)
    words = ["python", "-m", "jobs.replay", campaign, "--store", store, "--tracking-uri", uri]
    return shlex.join([*words, *(("--mlflow-artifacts", mode) if mode != "copy" else ())])
