"""Verdicts: which candidate wins, by the drift gate and the limits (docs/contract.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from freezer.freezing.validation.timed_cells import Cell
from freezer.freezing.validation.trials import Trial
from freezer.limits import CLOCKS, Limits
from freezer.timing.sampling import Speedup

Verdict = Literal["published", "kept-eager", "rejected", "failed", "unstable"]


def decide(trials: Sequence[Trial], cells: Sequence[Cell], limits: Limits, *, on_drift_alone: bool) -> tuple[Verdict, str, Trial]:
    """The verdict (docs/contract.md), its reason, and the trial that won or came nearest."""
    passing = [trial for trial in trials if trial.problem is None]
    if not passing:
        nearest = min(trials, key=lambda t: t.drift.error_ratio if t.drift and t.drift.error_ratio is not None else math.inf)
        return "rejected", f"{nearest.candidate.recipe}: {nearest.problem}", nearest
    if on_drift_alone:
        return "published", f"{passing[0].candidate.capture} program, judged on drift alone", passing[0]
    sampling = cells[0].sampling
    if not sampling.stable:
        reason = sampling.problem
        if sampling.device and (shared := sampling.device.get("num_rounds_shared")):
            reason += f"; in {shared} of them another process used the GPU"
        return "unstable", reason, passing[0]
    measured = [(trial, trial.speedup) for trial in passing if trial.speedup]
    ranked = sorted(measured, key=lambda pair: (sampling.stopped(pair[0].candidate.recipe), -pair[1].value))
    how = f"; {CLOCKS[sampling.clock]}, since {sampling.disturbance}" if sampling.clock != "wall" else ""
    for trial, faster in ranked:
        if over_limit(trial, faster, limits) is None:
            reason = f"{trial.candidate.recipe} is {faster.value:.2f} times as fast as eager (at least {faster.low:.2f})"
            return "published", f"{reason}{how}", trial
    fastest, faster = ranked[0]
    # Noise may hide a speedup: then the artifact that serves stays.
    verdict: Verdict = "unstable" if sampling.clock == "disturbed" else "kept-eager"
    return verdict, f"{fastest.candidate.recipe}: {over_limit(fastest, faster, limits)}{how}", fastest


def over_limit(trial: Trial, faster: Speedup, limits: Limits) -> str | None:
    """The limit on speed or size that a trial exceeds; None if it meets all."""
    median = (trial.latency_ms or {}).get("p50")
    size_mb = trial.candidate.size_bytes / 1e6
    if faster.low <= limits.speedup_min:
        return f"speedup {faster.value:.2f}, at least {faster.low:.2f}; speedup_min is {limits.speedup_min:g}"
    if limits.latency_ms_max is not None and (median is None or median > limits.latency_ms_max):
        return f"median {median} ms; latency_ms_max is {limits.latency_ms_max:g}"
    if limits.size_mb_max is not None and size_mb > limits.size_mb_max:
        return f"{size_mb:.1f} MB; size_mb_max is {limits.size_mb_max:g}"
    return None
