"""Verdicts: which candidate wins. The drift gate and the limits decide who may, the objective which
of them does.

docs/contract.md describes both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from freezer.artifact import Tradeoff, num_items
from freezer.freezing.judging.timed_cells import Cell
from freezer.freezing.judging.trials import Trial
from freezer.spec import CLOCKS, Limits, Objective, SamplingPolicy, timing_of
from freezer.timing import MIN_SAMPLES, Sampling, Speedup

Verdict = Literal["published", "kept-eager", "kept-previous", "rejected", "failed", "unstable"]

ALIKE = 1.05
"""Sizes within this ratio of the least count as equal: the fastest of these candidates wins."""

_BY = {"p50": "", "p95": " by p95", "throughput": " in throughput"}


def decide(
    trials: Sequence[Trial],
    cells: Sequence[Cell],
    limits: Limits,
    objective: Objective,
    *,
    on_drift_alone: bool,
) -> tuple[Verdict, str, Trial]:
    """The verdict (docs/contract.md), its reason, and the trial that won or came nearest."""
    passing = [trial for trial in trials if trial.problem is None]
    if not passing:
        nearest = min(
            trials,
            key=lambda t: (
                t.drift.error_ratio if t.drift and t.drift.error_ratio is not None else math.inf
            ),
        )
        return "rejected", f"{nearest.candidate.recipe}: {nearest.problem}", nearest
    if on_drift_alone:
        return (
            "published",
            f"{passing[0].candidate.capture} program, judged on drift alone",
            passing[0],
        )
    sampling = cells[0].sampling
    if not sampling.stable:
        return "unstable", _unstable(sampling, objective), passing[0]
    measured = [(trial, trial.speedup) for trial in passing if trial.speedup]
    able = [pair for pair in measured if over_limit(*pair, limits, objective) is None]
    best, faster = _best(able or measured, sampling, objective)
    how = (
        f"; {CLOCKS[sampling.clock]}, since {sampling.disturbance}"
        if sampling.clock != "wall"
        else ""
    )
    if able:
        return "published", f"{_praise(best, faster, objective)}{how}", best
    # Noise may hide a speedup: then the artifact that serves stays.
    verdict: Verdict = "unstable" if sampling.clock == "disturbed" else "kept-eager"
    return (
        verdict,
        f"{best.candidate.recipe}: {over_limit(best, faster, limits, objective)}{how}",
        best,
    )


def conversion(trials: Sequence[Trial], cells: Sequence[Cell], policy: SamplingPolicy) -> str:
    """What moving a TorchScript model to torch.export gains, as the end of a reason; empty unless
    its converted program was judged.
    """
    by_capture = {trial.candidate.capture: trial for trial in trials}
    converted = by_capture.get("convert")
    if converted is None:
        return ""
    recipe = converted.candidate.recipe
    if converted.problem is not None:
        return f"; {recipe}, converted to torch.export, does not pass the drift gate"
    sampling = cells[0].sampling
    torchscript = [
        trial.candidate.recipe
        for trial in trials
        if trial.candidate.lowering == "torchscript" and trial.problem is None
    ]
    if not torchscript:
        return f"; {recipe}, converted to torch.export, passes the drift gate"
    against = min(torchscript, key=lambda name: statistics.median_high(sampling.pooled(name)))
    faster = cells[0].faster(recipe, against, 1, policy)
    if faster is None:
        return f"; {recipe}, converted to torch.export, was not timed"
    return (
        f"; {recipe}, converted to torch.export, is {faster.value:.2f} times"
        f" ({faster.low:.2f}-{faster.high:.2f}) as fast as {against}"
    )


def rivals(trials: Sequence[Trial], limits: Limits, objective: Objective) -> list[str]:
    """The recipes that could win by their median, so that what is clearly slower need not be timed
    to the end.
    """
    return [
        trial.candidate.recipe
        for trial in trials
        if objective == "p50" and trial.problem is None and _over_footprint(trial, limits) is None
    ]


def _best(
    measured: Sequence[tuple[Trial, Speedup]], sampling: Sampling, objective: Objective
) -> tuple[Trial, Speedup]:
    """The fastest trial; if the objective is the size, the fastest of about the least size."""
    if objective == "size":
        least = min(trial.candidate.size_bytes for trial, _ in measured)
        measured = [pair for pair in measured if pair[0].candidate.size_bytes <= ALIKE * least]
    return max(
        measured, key=lambda pair: (not sampling.stopped(pair[0].candidate.recipe), pair[1].value)
    )


def _unstable(sampling: Sampling, objective: Objective) -> str:
    reason, needed = sampling.problem, MIN_SAMPLES["p95"]
    if (
        objective == "p95"
        and 0
        < (num_calls := min(len(sampling.pooled(name)) for name in sampling.samples_ms))
        < needed
    ):
        reason += f"; {num_calls} calls of the slowest entrant, of {needed} that p95 needs"
    if sampling.device and (shared := sampling.device.get("num_rounds_shared")):
        reason += f"; in {shared} of them another process used the GPU"
    return reason


def _praise(trial: Trial, faster: Speedup, objective: Objective) -> str:
    """Why a trial won."""
    by = _BY[timing_of(objective)]
    speed = f"{faster.value:.2f} times as fast as eager{by} (at least {faster.low:.2f})"
    if objective != "size":
        return f"{trial.candidate.recipe} is {speed}"
    return (
        f"{trial.candidate.recipe}: {trial.candidate.size_bytes / 1e6:.1f} MB, the least of those"
        f" within the limits; {speed}"
    )


def over_limit(
    trial: Trial, faster: Speedup, limits: Limits, objective: Objective = "p50"
) -> str | None:
    """The limit on speed, size or memory that a trial exceeds; None if it meets all."""
    percentile = "p95" if objective == "p95" else "p50"
    latency_ms = (trial.latency_ms or {}).get(percentile)
    if faster.low <= limits.speedup_min:
        by = _BY[timing_of(objective)]
        return (
            f"speedup{by} {faster.value:.2f}, at least {faster.low:.2f}; speedup_min is"
            f" {limits.speedup_min:g}"
        )
    if limits.latency_ms_max is not None and (
        latency_ms is None or latency_ms > limits.latency_ms_max
    ):
        name = "median" if percentile == "p50" else percentile
        return f"{name} {latency_ms} ms; latency_ms_max is {limits.latency_ms_max:g}"
    return _over_footprint(trial, limits)


def _over_footprint(trial: Trial, limits: Limits) -> str | None:
    size_mb = trial.candidate.size_bytes / 1e6
    memory_mb = trial.cold_start.memory_mb if trial.cold_start else math.inf
    if limits.size_mb_max is not None and size_mb > limits.size_mb_max:
        return f"{size_mb:.1f} MB; size_mb_max is {limits.size_mb_max:g}"
    if limits.memory_mb_max is not None and memory_mb > limits.memory_mb_max:
        return f"{memory_mb:.1f} MB of memory; memory_mb_max is {limits.memory_mb_max:g}"
    return None


def pareto(trials: Sequence[Trial], cells: Sequence[Cell]) -> tuple[Tradeoff, ...]:
    """The Pareto front of the trials that passed the drift gate, the fastest first; empty if the
    machine was too disturbed.

    It is about the speedup in the objective's figure, the size, and, where they were measured, load
    time and memory. Limits do not matter.
    """
    measured = [
        (trial, _smaller_is_better(trial, trial.speedup))
        for trial in trials
        if trial.problem is None and trial.speedup
    ]
    front = [
        (trial, own)
        for trial, own in measured
        if not any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for _, other in measured
        )
    ]
    return tuple(_tradeoff(trial, cells[0]) for trial, _ in sorted(front, key=lambda pair: pair[1]))


def _smaller_is_better(trial: Trial, faster: Speedup) -> tuple[float, ...]:
    cold = trial.cold_start
    return (
        -faster.value,
        trial.candidate.size_bytes,
        *((cold.load_ms, cold.memory_mb) if cold else ()),
    )


def _tradeoff(trial: Trial, cell: Cell) -> Tradeoff:
    ms, cold = trial.latency_ms or {}, trial.cold_start
    return Tradeoff(
        recipe=trial.candidate.recipe,
        p50_ms=ms.get("p50"),
        p95_ms=ms.get("p95"),
        items_per_s=num_items(cell.point) * 1e3 / cell.sampling.mean_ms(trial.candidate.recipe),
        load_ms=cold.load_ms if cold else None,
        memory_mb=cold.memory_mb if cold else None,
        size_mb=trial.candidate.size_bytes / 1e6,
    )
