"""Requests that the driver sends to workers, and the results that they return: of a judge, figures
of every candidate, without samples and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING

from freezer.artifact import UNMEASURED
from freezer.codec import OMIT_DEFAULT, JsonView, decode, encode, frozen
from freezer.freezing.recipes import EAGER
from freezer.spec import Clock, SamplingPolicy
from pipeline.catalog import Entry
from pipeline.records import CandidateReport, Failure, JudgeFindings, OutputDrift, nested_json

if TYPE_CHECKING:
    from freezer.freezing.drift import DriftRow
    from freezer.freezing.judging import Judgement, Trial

MAX_LISTED_IN_LEDGER = 10
"""Length of each list of a freezing report in the ledger; the manifest has longer ones."""

MAX_OUTPUTS = 24
"""Outputs and input sets of a candidate whose drift the ledger stores; `evidence/drift.parquet` of
an artifact has all.
"""


@frozen
class Request:
    """Work on one model and class.

    Attributes:
        builds: keys of the candidates, by recipe, in order.
        threads: the counts to judge for, the deciding one first.
        source: key of the source, under which its weights are shared.
    """

    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    threads: tuple[int, ...]
    store: str
    source: str = ""


@frozen
class BuildRequest(Request):
    """Builds that share the captures of the model. That of `portable` is for that class."""


@frozen
class JudgeRequest(Request):
    """One judge.

    Attributes:
        failures: for every other recipe, why it has no candidate.
        inherits: whether the winner inherits the speed of the artifact that serves now.
        drift_max: error ratio above which it does not.
        confirms: whether a short timing confirms the inherited speed, as nothing waits for the
            machine.
        previous: digest of the image of the artifact that serves now; the worker sets it.
        further: whether to add the payloads that follow the verdict; the worker sets it.
        beside: the judge of `portable` for the same model, which shares its reference.
    """

    key: str
    policy: SamplingPolicy
    campaign: str
    failures: Mapping[str, str] = field(default_factory=dict)
    inherits: bool = False
    drift_max: float = math.inf
    confirms: bool = False
    previous: str | None = None
    further: bool = True
    beside: JudgeRequest | None = None


@frozen
class JudgeResult(JudgeFindings):
    """Result of a judge. Its candidates are those that were judged.

    Attributes:
        reason: of the verdict, which is `failed` if there is no judgement.
        contest: why the winner cannot inherit a speed; empty if it does, or need not.
        has_artifact: whether the store contains an artifact folder to publish.
        left_out: why the others were not judged, by recipe: each ended a child that had it in hand.
        peak_bytes: of the child.
    """

    reason: str
    contest: str = field(default="", metadata=OMIT_DEFAULT)
    has_artifact: bool = False
    left_out: Mapping[str, Failure] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    host: JsonView | None = None
    peak_bytes: int = 0

    @classmethod
    def of_failure(cls, failure: Failure) -> JudgeResult:
        """Return the result of a judge that failed."""
        return cls(
            verdict="failed",
            reason=failure.message,
            failure=failure,
        )

    @classmethod
    def from_json(cls, data: JsonView) -> JudgeResult:
        """Return the result that `flat_json` wrote, also after a pass through JSON text."""
        return decode(cls, nested_json(data), origin="judge result")


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
        candidates=tuple(_report(trial, request.builds) for trial in judgement.trials),
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
    deciles = {name: sampling.deciles(name) for name in names if name in sampling.samples_ms}
    return {name: values for name, values in deciles.items() if values}


def _report(trial: Trial, builds: Mapping[str, str]) -> CandidateReport:
    candidate = trial.candidate
    reports = candidate.shortened_reports(MAX_LISTED_IN_LEDGER)
    return CandidateReport(
        recipe=candidate.recipe,
        build_key=builds[candidate.recipe],
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
        reports={path: encode(report) for path, report in reports.items()},
        explanation=trial.explanation,
        outputs=_outputs(trial.drift.rows),
    )


def _outputs(rows: Sequence[DriftRow]) -> tuple[OutputDrift, ...]:
    """The worst row of each output and input set, the worst first, at most MAX_OUTPUTS."""
    worst = {(row.output, row.kind, row.set_index): row for row in sorted(rows, key=_severity)}
    names = [part.name for part in fields(OutputDrift)]
    shown = []
    for row in sorted(worst.values(), key=_severity, reverse=True)[:MAX_OUTPUTS]:
        shown.append(OutputDrift(**{name: getattr(row, name) for name in names}))
    return tuple(shown)


def _severity(row: DriftRow) -> tuple[bool, float, float]:
    """Order of rows of drift: failed, then by error ratio, then by error."""
    ratio = row.error_ratio or 0.0
    return row.problem is not None, math.inf if math.isnan(ratio) else ratio, row.max_abs_err or 0.0
