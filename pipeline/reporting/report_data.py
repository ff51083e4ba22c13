"""Data of the HTML report: a row for each outcome, and for each model what its details show.

Plain JSON, made of the ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freezer.artifact import describe_freezing, place_text
from freezer.codec import encode
from freezer.hardware import DEVICE_CLASSES, PORTABLE, can_run
from pipeline.ledger import CampaignRecord, History
from pipeline.records import CandidateReport, Outcome, iso
from pipeline.reporting.comparison import OutcomeChange, compare
from pipeline.reporting.model_history import PastOutcome, past_outcomes, size_mb

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


def overview(data: CampaignData) -> dict[str, Any]:
    """The campaign, its device classes, and a row for each outcome."""
    record = data.record
    classes = Counter(outcome.device_class for outcome in data.outcomes)
    toolchains = {name: facts.toolchain for name, facts in record.facts.items()}
    hosts = dict.fromkeys(str(one.host["cpu"]) for one in data.outcomes if one.host.get("cpu"))
    return {
        "campaign": data.campaign,
        "catalog": record.catalog,
        "store": data.store,
        "started": iso(record.started),
        "seconds": None if record.finished is None else record.finished - record.started,
        "exit_code": record.exit_code,
        "interrupted": record.interrupted,
        "planned": record.num_planned,
        "against": data.against,
        "classes": sorted(classes, key=_specific_first),
        "toolchain": next(iter(toolchains.values()), {}),
        "hosts": list(hosts),
        "rows": [
            _row(outcome, data.changes.get((outcome.model, outcome.device_class)))
            for outcome in data.outcomes
        ],
    }


def details(data: CampaignData, model: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the report shows of one model, besides its rows.

    Args:
        data: of the campaign.
        model: its name.
        outcomes: of the model, one for each device class.
    """
    past = data.history.of_model(model) if data.history else []
    published = [
        outcome.device_class
        for outcome in outcomes
        if outcome.verdict in ("published", "kept-previous")
    ]
    return {
        "classes": {one.device_class: _detail(one) for one in outcomes},
        "serves": {
            one.device_class: _rung(one.device_class, published)
            for one in outcomes
            if one.device_class in DEVICE_CLASSES
        },
        "history": {name: _past(own) for name, own in past_outcomes(past).items()},
    }


def _past(past: Sequence[PastOutcome]) -> list[dict[str, Any]]:
    """The latest outcomes of a model and class, the oldest first."""
    return [
        {
            "time": iso(one.time),
            "verdict": one.verdict,
            "version": one.version,
            "recipe": one.recipe,
            "speedup": _finite(one.speed.value) if one.speed else None,
            "ci": [_finite(one.speed.low), _finite(one.speed.high)] if one.speed else None,
            "error_ratio": _finite(one.error_ratio),
            "size_mb": _finite(one.size_mb),
            "build_s": _finite(one.build_s),
            "torch": one.torch,
            "coldpress": one.coldpress,
            "change": one.change.kind if one.change else None,
            "why": one.change.why if one.change else "",
        }
        for one in past[-MAX_HISTORY:]
    ]


ROW = (
    *(
        "model",
        "device_class",
        "verdict",
        "recipe",
        "speedup",
        "low",
        "high",
        "margin",
        "error_ratio",
        "size_mb",
        "p50_ms",
        "eager_ms",
    ),
    *(
        "version",
        "cached",
        "code",
        "reason",
        "change",
        "change_why",
        "build_s",
        "judge_s",
        "failed",
    ),
)
"""Columns of the rows, in order."""


def _row(outcome: Outcome, change: OutcomeChange | None) -> list[Any]:
    figures = outcome.figures
    latency, drift, ci = (
        figures.latency_ms,
        figures.drift,
        figures.speedup_ci or (None, None),
    )
    return [
        *(outcome.model, outcome.device_class, outcome.verdict, outcome.recipe),
        *map(
            _finite,
            (figures.speedup, *ci, drift.margin, drift.error_ratio, size_mb(outcome)),
        ),
        *map(_finite, (latency.p50, latency.eager_p50)),
        *(outcome.version, outcome.cached, outcome.code or outcome.failure_kind, outcome.reason),
        *(change.kind if change else None, change.why if change else ""),
        *(_finite(outcome.build_s), _finite(outcome.judge_s), outcome.failed),
    ]


def _detail(outcome: Outcome) -> dict[str, Any]:
    return {
        "source": outcome.source,
        "num_threads": outcome.num_threads,
        "objective": outcome.objective,
        "clock": outcome.clock,
        "cpu": outcome.host.get("cpu"),
        "torch": outcome.host.get("torch"),
        "artifact": outcome.artifact,
        "registered_as": outcome.registered_as,
        "tags": dict(outcome.tags),
        "task_metric": outcome.task_metric,
        "previous": encode(outcome.previous) if outcome.previous else None,
        "failure": outcome.failure_kind,
        "log_tail": outcome.log_tail[-MAX_LOG_CHARS:],
        "deciles_ms": {name: list(values) for name, values in outcome.deciles_ms.items()},
        "candidates": [_candidate(one) for one in outcome.candidates],
    }


def _candidate(report: CandidateReport) -> dict[str, Any]:
    figures = report.figures
    return {
        "recipe": report.recipe,
        "problem": report.problem,
        "failure": report.failure,
        "how": f"{report.capture} → {report.lowering}"
        if report.capture and report.lowering
        else "",
        "speedup": _finite(figures.speedup),
        "ci": list(figures.speedup_ci) if figures.speedup_ci else None,
        "latency_ms": {name: _finite(value) for name, value in encode(figures.latency_ms).items()},
        "drift": {name: _finite(value) for name, value in encode(figures.drift).items()},
        "size_mb": report.size_bytes / 1e6,
        "num_payloads": report.num_payloads,
        "build_s": report.build_s,
        "points": [_point(item) for item in report.points],
        "outputs": [
            {name: _finite(value) for name, value in encode(item).items()}
            for item in report.outputs
        ],
        "freezing": [list(row) for row in describe_freezing(report.freezing, report.tried)],
    }


def _point(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "place": place_text(item["threads"], item["point"]),
        "payload": item["payload"],
        **{name: _finite(item.get(name)) for name in ("eager_p50", "p50", "p90", "p99", "speedup")},
        "ci": item.get("speedup_ci"),
        "verdict": item.get("verdict"),
    }


def _rung(machine: str, published: Iterable[str]) -> str | None:
    """The published class that serves on machines of a class: its own, else the closest that they
    run; None if none does.
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


def _finite(value: Any) -> Any:
    """The value, infinities and NaN as strings, which JSON lacks; floats with five digits."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
