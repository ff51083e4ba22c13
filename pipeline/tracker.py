"""The tracker: shows a campaign's final outcomes in MLflow, and goes on without MLflow when it cannot be reached.

The ledger is the truth and is written first. What MLflow missed is logged by the next start of the same campaign.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from freezer.artifact import Artifact
from freezer.errors import InfrastructureError, IntegrityError
from freezer.store import Store
from pipeline.outcome import Outcome

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
        failures: what went wrong, one sentence each; when there is one, nothing more is tried.
    """

    def __init__(self, tracking_uri: str, campaign: str, store: Store, *, mode: ArtifactMode) -> None:
        self._uri, self._campaign, self._store, self._mode = tracking_uri, campaign, store, mode
        self._projection: Projection | None = None
        self.failures: list[str] = []

    def start(self, catalog: str, started: float) -> None:
        """Open MLflow and the campaign's parent run."""

        def opened() -> Projection:
            from pipeline.tracking.projection import Projection  # mlflow takes two seconds to import

            projection = Projection.open(self._uri, self._campaign)
            projection.start(catalog, started)
            return projection

        self._projection = self._tried(opened)

    def log(self, outcomes: Sequence[Outcome]) -> None:
        """Log the final outcomes of one model, and register what is published. Doing it again changes nothing."""
        for outcome in sorted(outcomes, key=lambda outcome: outcome.verdict == "kept-eager"):
            if self._projection is not None and not self.failures:
                self._tried(lambda outcome=outcome: self._log(outcome))  # type: ignore[misc]

    def _log(self, outcome: Outcome) -> None:
        from pipeline.tracking import registry

        projection = self._projection
        assert projection is not None, "log is called after start"
        if outcome.verdict != "published" or outcome.version is None:
            projection.log_outcome(outcome, None)
            if outcome.artifact is not None:
                registry.alias(projection.client, outcome.model, outcome.device_class, outcome.artifact)
            return
        with tempfile.TemporaryDirectory(prefix="coldpress-mlflow-") as scratch:
            version = self._store.version(f"{outcome.model}:{outcome.version}")
            artifact: Artifact = self._store.materialize(version, outcome.device_class, Path(scratch))
            run_id = projection.log_outcome(outcome, artifact)
            registry.register(
                projection.client,
                projection.experiment_id,
                outcome,
                artifact,
                run_id=run_id,
                mode=self._mode,
                store_uri=str(self._store.root),
            )

    def finish(self, outcomes: Sequence[Outcome], exit_code: int, *, interrupted: bool) -> None:
        """Write the summary and the figures, and end the parent run."""
        projection = self._projection
        if projection is not None and not self.failures:
            self._tried(lambda: projection.finish(outcomes, exit_code, interrupted))

    def _tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except (InfrastructureError, IntegrityError) as error:
            self.failures.append(
                f"MLflow: {error}; the store and the ledger are complete, and the same command brings MLflow up to date"
            )
            return None
