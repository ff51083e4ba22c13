"""Outcomes and candidates as a campaign might have them, with every field that MLflow shows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from freezer.artifact import Measured, MeasuredDrift, MeasuredLatency
from pipeline.records import CandidateReport, Failure, Outcome

Record = TypeVar("Record", CandidateReport, Outcome)
FIGURES = Measured(
    speedup=2.0,
    speedup_ci=(1.8, 2.2),
    drift=MeasuredDrift(error_ratio=1.25, max_abs_err=1e-6, sqnr_db=120.0, margin=2.4),
    latency_ms=MeasuredLatency(eager_p50=2.0, p50=1.0, p90=1.2, p99=None),
)
DIGEST = "sha256:" + 64 * "a"
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def candidate(recipe: str, **changes: Any) -> CandidateReport:
    made = CandidateReport(
        recipe=recipe,
        build_key=f"key-of-{recipe}",
        capture="export",
        build_s=2.5,
        size_bytes=1_500_000,
        num_payloads=1,
        figures=replace(FIGURES, latency_ms=MeasuredLatency(p50=1.0, p90=1.2, p99=None)),
    )
    return changed(made, changes)


def outcome(model: str, **changes: Any) -> Outcome:
    made = Outcome(
        model=model,
        device_class="portable",
        verdict="published",
        reason="judged on drift alone",
        num_threads=2,
        source="python:examples:tiny",
        source_key="a-source",
        judge_key="a-judge",
        recipe="portable",
        figures=FIGURES,
        artifact=DIGEST,
        version=3,
        build_s=2.5,
        judge_s=4.0,
        candidates=(
            candidate("portable"),
            candidate("torchscript-frozen", problem="error_ratio 41.2 > 3", speedup=None),
        ),
    )
    return changed(made, changes)


def failed(model: str, kind: str = "source", **changes: Any) -> Outcome:
    failure = Failure(kind=kind, log_tail="Traceback: gone")
    return outcome(
        model,
        **{"verdict": "failed", "failure": failure, "artifact": None, "candidates": (), **changes},
    )


def changed(record: Record, changes: dict[str, Any]) -> Record:
    """The record with other fields, of its figures too."""
    figures = {
        item.name: changes.pop(item.name) for item in fields(Measured) if item.name in changes
    }
    return replace(record, figures=replace(record.figures, **figures), **changes)
