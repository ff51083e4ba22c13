"""Trials and judgements with given figures, without models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freezer.artifact import ColdStart, MeasuredLatency
from freezer.freezing.judging import Cell, Judgement, Trial
from freezer.freezing.recipes import EAGER
from freezer.timing import Sampling, Speedup
from tests.support.steps import plain_candidate, plain_payload


def trial(
    recipe: str,
    *,
    speedup: float,
    size_mb: float,
    load_ms: float,
    memory_mb: float,
    **changes: Any,
) -> Trial:
    """A timed trial; the interval of its speedup is 5% to each side."""
    payload = plain_payload(num_threads=1, size_bytes=int(size_mb * 1e6))
    cold_start = ColdStart(
        import_torch_ms=1e3,
        open_ms=load_ms / 2,
        first_call_ms=load_ms / 2,
        second_call_ms=1.0,
        memory_before_mb=200.0,
        memory_peak_mb=200.0 + memory_mb,
    )
    plain = Trial(
        candidate=plain_candidate(payload, recipe=recipe),
        latency_ms=MeasuredLatency(p50=10 / speedup, p95=12 / speedup),
        speedup=Speedup(value=speedup, low=speedup * 0.95, high=speedup * 1.05),
        cold_start=cold_start,
    )
    return replace(plain, **changes)


def judgement(*trials: Trial, **milliseconds: float) -> Judgement:
    """Trials that were timed with these latencies, 10 ms by default."""
    names = (EAGER, *(trial.recipe for trial in trials))
    samples_ms = {name: [[milliseconds.get(name, 10.0)] * 20] * 20 for name in names}
    cell = Cell(
        num_threads=1,
        point={"batch": 4},
        sampling=Sampling(samples_ms=samples_ms, num_dropped=0, settled=True, stable=True),
        payloads={},
    )
    return Judgement(trials=trials, cells=(cell,))
