"""The result of a campaign, its exit code, and the JSON of `--json`."""

from __future__ import annotations

import json
from pathlib import Path

from freezer.codec import Json, encode, finite, frozen
from freezer.errors import FAILED, INFRASTRUCTURE, INTERRUPTED, OK, InfrastructureError
from freezer.files import make_folder, write_whole
from pipeline.records import Outcome, iso


@frozen
class CampaignReport:
    """The result of a campaign.

    Attributes:
        campaign: its name.
        started, finished: seconds since the epoch.
        outcomes: of every (model, device class), in the order of the catalog.
        infrastructure: failures of Ray, MLflow or the store, one sentence each.
        interrupted: whether a person stopped it.
        num_builds: number of its builds that the store keeps.
        experiment_id: in MLflow; empty if it was not reached.
    """

    campaign: str
    started: float
    finished: float
    outcomes: tuple[Outcome, ...]
    infrastructure: tuple[str, ...] = ()
    interrupted: bool = False
    num_builds: int = 0
    experiment_id: str = ""

    @property
    def exit_code(self) -> int:
        """130, else 3, else 1, else 0; see docs/reference/contract.md."""
        if self.interrupted:
            return INTERRUPTED
        kinds = {outcome.failure_kind for outcome in self.outcomes}
        if self.infrastructure or "infrastructure" in kinds:
            return INFRASTRUCTURE
        return FAILED if any(outcome.failed for outcome in self.outcomes) else OK

    def to_json(self) -> Json:
        """The content of the `--json` file."""
        return {
            "campaign": self.campaign,
            "started": iso(self.started, timespec="milliseconds"),
            "finished": iso(self.finished, timespec="milliseconds"),
            "exit_code": self.exit_code,
            "outcomes": [_outcome_json(outcome) for outcome in self.outcomes],
        }

    def write_json(self, path: Path) -> None:
        """Write the `--json` file atomically.

        Raises:
            InfrastructureError: the file cannot be written.
        """
        try:
            make_folder(path.parent)
            write_whole(
                path,
                (
                    json.dumps(
                        finite(self.to_json()),
                        indent=1,
                        allow_nan=False,
                    )
                    + "\n"
                ).encode(),
            )
        except OSError as error:
            raise InfrastructureError(
                f"--json {path} cannot be written: {error}; nothing else is lost, run the same"
                " command to write it from the ledger"
            ) from error


_COPIED = (
    "model",
    "device_class",
    "verdict",
    "cached",
    "recipe",
    "reason",
    "num_threads",
    "speedup",
    "speedup_ci",
    "drift",
    "latency_ms",
    "artifact",
    "version",
    "build_s",
    "judge_s",
)
"""Keys of an outcome in `--json` that equal those of the ledger, in order."""


def _outcome_json(outcome: Outcome) -> Json:
    """Return an outcome in the form of docs/reference/contract.md's `--json`."""
    stored = outcome.to_json()
    shown = {name: stored[name] for name in _COPIED}
    if shown["latency_ms"]:
        shown["latency_ms"] = {"eager_p50": None, "p95": None, **shown["latency_ms"]}
    return shown | {
        "reason": outcome.coded_reason,
        "clock": outcome.clock,
        "objective": outcome.objective,
        "pareto": [encode(tradeoff) for tradeoff in outcome.pareto],
        "warnings": list(outcome.warnings),
        "previous": encode(outcome.previous) if outcome.previous else None,
    }
