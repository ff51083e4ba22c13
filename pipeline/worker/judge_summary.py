"""Judgements as the ledger stores them: figures of every candidate, without samples and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from freezer.artifact import UNMEASURED
from freezer.codec import encode
from freezer.freezing.recipes import EAGER
from freezer.spec import Clock
from pipeline.records import CandidateReport, OutputDrift
from pipeline.worker.requests import JudgeRequest, JudgeResult

if TYPE_CHECKING:
    from freezer.freezing.drift import DriftRow
    from freezer.freezing.judging import Judgement, Trial

MAX_LISTED_IN_LEDGER = 10
"""Length of each list of a freezing report in the ledger; the manifest has longer ones."""

MAX_OUTPUTS = 24
"""Outputs and input sets of a candidate whose drift the ledger stores; `evidence/drift.parquet` of
an artifact has all.
"""


def summary(request: JudgeRequest, judgement: Judgement) -> JudgeResult:
    """Return a judgement as the ledger stores it, without `has_artifact`."""
    from freezer.runtime.devices import host_fingerprint

    best = judgement.best
    measured = best.measured if best else UNMEASURED
    latency_ms = replace(measured.latency_ms, eager_p50=judgement.eager_ms.get("p50"))
    metric = None
    if judgement.task_metric is not None:
        metric = {"eager": judgement.task_metric}
        if best is not None and best.task_metric is not None:
            metric[best.candidate.recipe] = best.task_metric
    return JudgeResult(
        verdict=judgement.verdict,
        reason=judgement.reason,
        recipe=best.candidate.recipe if best else None,
        figures=replace(measured, latency_ms=latency_ms),
        clock=_clock(judgement),
        task_metric=metric,
        pareto=judgement.pareto,
        candidates=tuple(
            _report(trial, request.builds[trial.candidate.recipe]) for trial in judgement.trials
        ),
        host=host_fingerprint(),
        previous=judgement.previous,
        deciles_ms=_deciles_ms(judgement),
    )


def _clock(judgement: Judgement) -> Clock:
    """Which samples the figures of a judgement are of."""
    if judgement.inherited is not None:
        return "inherited"
    if judgement.sampling is None:
        return "wall" if judgement.winner is None else "none"
    return judgement.sampling.clock


def _deciles_ms(judgement: Judgement) -> dict[str, tuple[float, ...]]:
    """Latencies of eager and the candidates in the deciding cell."""
    sampling = judgement.sampling
    if sampling is None:
        return {}
    names = (EAGER, *(trial.candidate.recipe for trial in judgement.trials))
    timed = [name for name in names if name in sampling.samples_ms]
    deciles = {name: sampling.deciles(name) for name in timed}
    return {name: values for name, values in deciles.items() if values}


def _report(trial: Trial, key: str) -> CandidateReport:
    candidate = trial.candidate
    return CandidateReport(
        recipe=candidate.recipe,
        build_key=key,
        problem=trial.problem,
        capture=candidate.capture,
        lowering=candidate.lowering,
        tried=candidate.tried,
        build_s=candidate.build_s,
        size_bytes=candidate.size_bytes,
        num_payloads=len(candidate.payloads),
        figures=trial.measured,
        accuracy=trial.accuracy,
        task_metric=trial.task_metric,
        points=trial.points,
        warnings=candidate.warnings,
        strides_equal=trial.strides_equal,
        reports={
            path: encode(report)
            for path, report in candidate.shortened_reports(MAX_LISTED_IN_LEDGER).items()
        },
        explanation=trial.explanation,
        outputs=_outputs(trial.drift.rows),
    )


def _outputs(rows: Sequence[DriftRow]) -> tuple[OutputDrift, ...]:
    """The worst row of each output and input set, the worst first, at most MAX_OUTPUTS."""
    worst = {}
    for row in sorted(rows, key=_severity):
        worst[row.output, row.kind, row.set_index] = row
    return tuple(
        OutputDrift(
            output=row.output,
            kind=row.kind,
            set_index=row.set_index,
            error_ratio=row.error_ratio,
            max_abs_err=row.max_abs_err,
            sqnr_db=row.sqnr_db,
            problem=row.problem,
        )
        for row in sorted(
            worst.values(),
            key=_severity,
            reverse=True,
        )[:MAX_OUTPUTS]
    )


def _severity(row: DriftRow) -> tuple[bool, float, float]:
    """Order of rows of drift: failed, then by error ratio, then by error."""
    ratio = (
        math.inf
        if row.error_ratio is not None and math.isnan(row.error_ratio)
        else row.error_ratio or 0.0
    )
    return row.problem is not None, ratio, row.max_abs_err or 0.0
