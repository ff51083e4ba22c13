"""Outcomes and candidates as a campaign might have them, with every field that MLflow shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.records.outcome import CandidateReport, Outcome

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
        drift={"error_ratio": 1.25, "max_abs_err": 1e-6, "sqnr_db": 120.0, "margin": 2.4},
        latency_ms={"p50": 1.0, "p90": 1.2, "p99": None},
        speedup=2.0,
        speedup_ci=(1.8, 2.2),
    )
    return replace(made, **changes)


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
        speedup=2.0,
        speedup_ci=(1.8, 2.2),
        drift={"error_ratio": 1.25, "max_abs_err": 1e-6, "sqnr_db": 120.0, "margin": 2.4},
        latency_ms={"eager_p50": 2.0, "p50": 1.0, "p90": 1.2, "p99": None},
        artifact=DIGEST,
        version=3,
        build_s=2.5,
        judge_s=4.0,
        candidates=(candidate("portable"), candidate("torchscript-frozen", problem="error_ratio 41.2 > 3", speedup=None)),
    )
    return replace(made, **changes)


def failed(model: str, **changes: Any) -> Outcome:
    return outcome(
        model,
        **{"verdict": "failed", "failure": "source", "artifact": None, "candidates": (), "log_tail": "Traceback: gone", **changes},
    )
