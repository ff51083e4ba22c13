"""Data of the HTML report: a row for each outcome, and for each model what its details show.

Plain JSON, made of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from freezer.artifact import PointFigures, describe_freezing
from freezer.codec import encode
from freezer.hardware import DEVICE_CLASSES, PORTABLE, can_run
from pipeline.ledger import CampaignRecord, History
from pipeline.records import CandidateReport, Outcome, Row, iso
from pipeline.reporting.comparison import OutcomeChange, compare
from pipeline.reporting.model_history import PastOutcome, past_outcomes

MAX_HISTORY = 30
"""Latest outcomes of a model and class that its history shows."""

MAX_LOG_CHARS = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignData:
    """A campaign, as the report shows it.

    Attributes:
        record: the campaign in the ledger.
        outcomes: in the order of the catalog.
        changes: since the campaign `against`, by model and class; empty without one.
        history: every outcome that the ledger has of a model, by its name; None leaves histories
            out.
        store: URI of the store, as commands name it.
    """

    campaign: str
    record: CampaignRecord
    outcomes: Sequence[Outcome]
    store: str
    against: str | None = None
    changes: Mapping[tuple[str, str], OutcomeChange] = field(default_factory=dict)
    history: History | None = None


def campaign_data(
    history: History, campaign: str, *, store: str, against: str | None = None
) -> CampaignData:
    """Read a campaign from the ledger.

    Args:
        history: of the store.
        campaign: its name.
        store: URI of the store.
        against: name of an earlier campaign to compare with.

    Raises:
        UsageError: the store lacks one of the campaigns; the message lists those that it has.
    """
    outcomes = history.outcomes(campaign)
    changes = compare(history.outcomes(against), outcomes) if against else []
    return CampaignData(
        campaign=campaign,
        record=history.record(campaign),
        outcomes=outcomes,
        store=store,
        against=against,
        changes={(change.model, change.device_class): change for change in changes},
        history=history,
    )


Json = dict[str, object]

COLUMNS = (
    "model",
    "device_class",
    "verdict",
    "recipe",
    "speedup",
    "speedup_ci_low",
    "speedup_ci_high",
    "margin",
    "size_mb",
    "version",
    "cached",
    "code",
    "reason",
    "build_s",
    "judge_s",
    "failed",
)
"""Fields of the rows, in order; then those of the change since an earlier campaign."""

CHANGE_COLUMNS = ("change", "change_why")


def overview(data: CampaignData) -> Json:
    """Return what the page shows at once: its classes, and a row for each outcome."""
    classes = Counter(outcome.device_class for outcome in data.outcomes)
    return {
        "store": data.store,
        "against": data.against,
        "classes": sorted(classes, key=_specific_first),
        "columns": (*COLUMNS, *CHANGE_COLUMNS),
        "rows": [_row(outcome, data.changes) for outcome in data.outcomes],
    }


def _row(outcome: Outcome, changes: Mapping[tuple[str, str], OutcomeChange]) -> list[object]:
    row = Row.of(outcome)
    values = [getattr(row, name) for name in COLUMNS]
    change = changes.get((outcome.model, outcome.device_class))
    if change is None:
        return [*values, None, ""]
    return [*values, change.kind, change.why]


def details(data: CampaignData, model: str, outcomes: Sequence[Outcome]) -> Json:
    """Return what the report shows of one model, besides its rows.

    Args:
        data: data of the campaign.
        model: name of the model.
        outcomes: its outcomes, one for each device class.
    """
    past = data.history.of_model(model) if data.history else []
    published = [
        outcome.device_class
        for outcome in outcomes
        if outcome.verdict in ("published", "kept-previous")
    ]
    machines = [one.device_class for one in outcomes if one.device_class in DEVICE_CLASSES]
    history = past_outcomes(past)
    return {
        "classes": {outcome.device_class: _detail(outcome) for outcome in outcomes},
        "serves": {machine: _rung(machine, published) for machine in machines},
        "history": {
            name: list(map(_past, reached[-MAX_HISTORY:])) for name, reached in history.items()
        },
    }


def _past(past: PastOutcome) -> Json:
    speed = past.speed
    return {
        **encode(past),
        "time": iso(past.time),
        "speedup": speed.value if speed else None,
        "ci": [speed.low, speed.high] if speed else None,
        "change": past.change.kind if past.change else None,
    }


def _detail(outcome: Outcome) -> Json:
    return {
        "source": outcome.source,
        "num_threads": outcome.num_threads,
        "objective": outcome.objective,
        "clock": outcome.clock,
        "cpu": outcome.host.get("cpu"),
        "torch": outcome.host.get("torch"),
        "artifact": outcome.artifact,
        "log_tail": outcome.log_tail[-MAX_LOG_CHARS:],
        "deciles_ms": outcome.deciles_ms,
        "candidates": [_candidate(report) for report in outcome.candidates],
    }


def _candidate(report: CandidateReport) -> Json:
    measured = report.figures
    built = report.capture and report.lowering
    return {
        "recipe": report.recipe,
        "problem": report.problem,
        "how": f"{report.capture} → {report.lowering}" if built else "",
        "speedup": measured.speedup,
        "ci": measured.speedup_ci,
        "latency_ms": encode(measured.latency_ms),
        "drift": encode(measured.drift),
        "size_mb": report.size_bytes / 1e6,
        "build_s": report.build_s,
        "points": [_point(point) for point in report.points],
        "outputs": [encode(output) for output in report.outputs],
        "freezing": list(describe_freezing(report.freezing, report.tried)),
    }


def _point(point: PointFigures) -> Json:
    return {"verdict": None, **encode(point), "place": point.place, "ci": point.speedup_ci}


def _rung(machine: str, published: Iterable[str]) -> str | None:
    """Return the published class that serves on machines of a class: its own, else the closest that
    they run; None if none does.
    """
    runnable = [name for name in published if name in DEVICE_CLASSES and can_run(name, machine)]
    return max(
        runnable,
        key=lambda name: sum(can_run(other, name) for other in DEVICE_CLASSES),
        default=None,
    )


def _specific_first(name: str) -> tuple[bool, int]:
    """Order of the columns: the most specific class first, `portable` last."""
    return name == PORTABLE, -list(DEVICE_CLASSES).index(name) if name in DEVICE_CLASSES else 0
