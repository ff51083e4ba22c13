"""Contents of MLflow runs: one record for each candidate, and the campaign's summary. Pure
functions; no mlflow.

Coldpress tags start with `coldpress.` and override an entry's own tag of the same name. A `/` in a
metric name makes a section in MLflow's pages.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from freezer.artifact import (
    FREEZING,
    UNMEASURED,
    figures_text,
    freezing_markdown,
)
from freezer.codec import encode
from freezer.hardware import PORTABLE
from pipeline.records import SKIPPED, CandidateReport, Outcome
from pipeline.tracking.descriptions import candidate_description
from pipeline.tracking.experiment import NOTE

NO_RECIPE = "none"
"""Recipe of the single run of an outcome without candidates."""

OUTCOME = "coldpress.outcome"
"""Tag with the digest of a run's contents."""

MAX_TAG_NAME_CHARS = 250
MAX_TAG_CHARS = 1000
"""Below the limits of every MLflow server."""

SUMMARY_COLUMNS = (
    *("model", "device_class", "verdict", "cached", "recipe"),
    *("speedup", "speedup_ci_low", "speedup_ci_high", "eager_p50_ms", "p50_ms"),
    *(
        "error_ratio",
        "max_abs_err",
        "margin",
        "num_threads",
        "version",
        "artifact",
        "build_s",
        "judge_s",
        "reason",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Contents of one run.

    Attributes:
        series: metrics with several values, by name and step.
        texts: text files by name.
        duration_s: wall time of the build.
    """

    recipe: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    series: Mapping[str, Mapping[int, float]]
    texts: Mapping[str, str]
    status: Literal["FINISHED", "FAILED"]
    duration_s: float

    @property
    def digest(self) -> str:
        """Digest of all contents; a run with another digest is out of date."""
        return self.tags[OUTCOME]


def free_tags(outcome: Outcome) -> dict[str, str]:
    """Return the entry's tags for runs and registered versions; characters that MLflow rejects or
    reserves in names become `_`.
    """
    tags: dict[str, str] = {}
    for given, text in outcome.tags.items():
        name = re.sub(r"[^\w\-. :/]", "_", given)[:MAX_TAG_NAME_CHARS] or "_"
        if posixpath.normpath(name) != name or name.startswith((".", "/", "mlflow.")):
            name = re.sub(r"[./]", "_", name)
        tags[name] = _cut(text)
    return tags


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TAG_CHARS else f"{text[: MAX_TAG_CHARS - 1]}…"


def run_records(outcome: Outcome, campaign: str) -> tuple[RunRecord, ...]:
    """Return one record for each candidate of an outcome, or a single one if it has no
    candidates.
    """
    if outcome.candidates:
        built = [candidate for candidate in outcome.candidates if candidate.failure != SKIPPED]
        return tuple(_candidate_record(outcome, candidate, campaign) for candidate in built)
    kind = outcome.failure_kind
    why = {
        "problem": outcome.reason or kind or outcome.verdict,
        "failure": kind,
        "code": outcome.code,
    }
    ending = f"{outcome.verdict}: {kind}" if kind else outcome.verdict
    return (
        RunRecord(
            recipe=NO_RECIPE,
            name=f"{outcome.model} · {outcome.device_class} · {ending}",
            tags=_tags(outcome, NO_RECIPE, campaign)
            | _present(why)
            | {NOTE: candidate_description(outcome, None)},
            params=_params(outcome),
            metrics={},
            series={},
            texts={"log.txt": outcome.log_tail} if outcome.log_tail else {},
            status="FAILED" if outcome.failed else "FINISHED",
            duration_s=outcome.build_s + outcome.judge_s,
        ),
    )


def _candidate_record(outcome: Outcome, candidate: CandidateReport, campaign: str) -> RunRecord:
    own = {
        "problem": candidate.problem,
        "failure": candidate.failure,
        "code": outcome.code,
        "build_key": candidate.build_key,
        "winner": (
            str(outcome.verdict == "published" and candidate.recipe == outcome.recipe).lower()
        ),
    }
    texts = {"warnings.txt": "\n".join(candidate.warnings)} if candidate.warnings else {}
    if candidate.reports:
        texts[FREEZING] = freezing_markdown(
            title=f"{outcome.model} for {outcome.device_class}, {candidate.recipe}",
            verdict=_candidate_verdict(candidate),
            tried=candidate.tried,
            freezing=candidate.freezing,
        )
    if candidate.failure and outcome.log_tail:
        texts["log.txt"] = outcome.log_tail
    return RunRecord(
        recipe=candidate.recipe,
        name=f"{outcome.model} · {outcome.device_class} · {candidate.recipe}",
        tags=_tags(outcome, candidate.recipe, campaign)
        | _present(own)
        | {NOTE: candidate_description(outcome, candidate)},
        params=_params(outcome) | _candidate_params(candidate),
        metrics=_metrics(outcome, candidate),
        series=_series(outcome, candidate),
        texts=texts,
        status="FAILED" if candidate.failure else "FINISHED",
        duration_s=candidate.build_s,
    )


def _candidate_verdict(candidate: CandidateReport) -> str:
    if candidate.problem:
        return f"Does not pass: {candidate.problem}"
    return f"Passes: {figures_text(candidate.figures.speedup, candidate.figures.drift.error_ratio)}"


def _tags(outcome: Outcome, recipe: str, campaign: str) -> dict[str, str]:
    return free_tags(outcome) | _present(
        {
            "campaign": campaign,
            "kind": "candidate",
            "model": outcome.model,
            "device_class": outcome.device_class,
            "recipe": recipe,
            "verdict": outcome.verdict,
            "reason": None if outcome.verdict == "published" else outcome.coded_reason,
            "objective": None if outcome.objective == "p50" else outcome.objective,
            "cached": str(outcome.cached).lower(),
            "source_key": outcome.source_key,
            "judge_key": outcome.judge_key,
            "artifact": outcome.artifact,
            "version": None if outcome.version is None else str(outcome.version),
            "host": str(outcome.host.get("cpu") or "") or None,
            OUTCOME.removeprefix("coldpress."): _digest(outcome, recipe),
        }
    )


def _present(tags: Mapping[str, str | None]) -> dict[str, str]:
    return {f"coldpress.{name}": _cut(text) for name, text in tags.items() if text}


def _params(outcome: Outcome) -> dict[str, str]:
    return {
        "model": outcome.model,
        "device_class": outcome.device_class,
        "source": outcome.source,
        "num_threads": str(outcome.num_threads),
    }


def _candidate_params(candidate: CandidateReport) -> dict[str, str]:
    point = candidate.points[0]["point"] if candidate.points else {}
    sizes = ", ".join(f"{name} {size}" for name, size in point.items())
    return {"recipe": candidate.recipe, "capture": candidate.capture or "none"} | (
        {"point": sizes} if sizes else {}
    )


def _metrics(outcome: Outcome, candidate: CandidateReport) -> dict[str, float]:
    figures, of_outcome = candidate.figures, outcome.figures
    found: dict[str, float | None] = {
        f"drift/{name}": value for name, value in encode(figures.drift).items()
    }
    found |= {f"latency_ms/{name}": value for name, value in encode(figures.latency_ms).items()}
    if figures.latency_ms != UNMEASURED.latency_ms:
        found["latency_ms/eager_p50"] = of_outcome.latency_ms.eager_p50
    found["speedup/value"] = figures.speedup
    if figures.speedup_ci:
        found["speedup/ci_low"], found["speedup/ci_high"] = figures.speedup_ci
    if outcome.previous is not None and candidate.recipe == outcome.recipe:
        found["speedup/over_previous"] = outcome.previous.speedup
    if candidate.num_payloads:
        found["size_mb/payloads"] = candidate.size_bytes / 1e6
    for item in outcome.pareto:
        if item.recipe == candidate.recipe:
            found |= {"load_ms/first_answer": item.load_ms, "memory_mb/added": item.memory_mb}
    found["build_s/total"] = candidate.build_s
    found["task_metric/value"] = candidate.task_metric
    if candidate.task_metric is not None and outcome.task_metric:
        found["task_metric/eager"] = outcome.task_metric.get("eager")
    return {
        name: _shown(value)
        for name, value in {**found, **_point_metrics(candidate)}.items()
        if value is not None
    }


def _shown(value: float) -> float:
    """Return a figure with 5 digits: MLflow's pages show all that it has.

    The ledger keeps them all.
    """
    return float(f"{value:.5g}")


def _series(outcome: Outcome, candidate: CandidateReport) -> dict[str, dict[int, float]]:
    """Return latencies by percentile, and the error ratios of each output by input set if there are
    several sets.
    """
    deciles = outcome.deciles_ms.get(candidate.recipe, ())
    found = {
        "latency_ms/by percentile": {10 * step: _shown(value) for step, value in enumerate(deciles)}
    }
    for item in candidate.outputs:
        if item.error_ratio is not None:
            output = re.sub(r"[^\w\-. ]", "_", item.output)
            name = (
                f"drift by input set/{output}"
                if item.kind == "single"
                else f"drift by input set/{output} {item.kind}"
            )
            found.setdefault(name[:MAX_TAG_NAME_CHARS], {})[item.set_index] = _shown(
                item.error_ratio
            )
    return {name: values for name, values in found.items() if len(values) > 1}


def _point_metrics(candidate: CandidateReport) -> dict[str, float | None]:
    """Return metrics for each timed thread count and point, like `latency_ms/threads 1 batch
    8/p50`; none if there is only one.
    """
    serves: dict[str, Mapping[str, Any]] = {}
    for item in candidate.points:
        sizes = [f"{name} {size}" for name, size in item["point"].items()]
        serves.setdefault(
            " ".join([f"threads {item['threads']}", *sizes]), item
        )  # the first of several payloads serves
    found: dict[str, float | None] = {}
    for place, item in serves.items() if len(serves) > 1 else ():
        found |= {
            f"latency_ms/{place}/{name}": item[name]
            for name in ("eager_p50", "p50", "p90", "p99")
            if name in item
        }
        found[f"speedup/{place}"] = item["speedup"]
    return found


def _digest(outcome: Outcome, recipe: str) -> str:
    """Digest an outcome and one of its recipes, ignoring `cached`: a resumed campaign takes its own
    outcomes from the ledger.
    """
    content = {**outcome.to_json(), "cached": False, "of_recipe": recipe}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def campaign_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Count the outcomes by verdict, add up the time of the campaign's own builds and judges, and
    sum up what was published.
    """
    fresh = [outcome for outcome in outcomes if not outcome.cached]
    counts = Counter(outcome.verdict for outcome in outcomes)
    published = [outcome for outcome in outcomes if outcome.verdict == "published"]
    speedups = [
        one.figures.speedup
        for one in published
        if one.figures.speedup and one.device_class != PORTABLE
    ]
    ratios = [ratio for one in published if (ratio := one.figures.drift.error_ratio) is not None]
    return {
        **{f"outcomes/{verdict}": float(count) for verdict, count in counts.items()},
        "outcomes/total": float(len(outcomes)),
        "outcomes/unchanged": float(len(outcomes) - len(fresh)),
        "build_s/total": round(sum(outcome.build_s for outcome in fresh), 1),
        "judge_s/total": round(sum(outcome.judge_s for outcome in fresh), 1),
        **(
            {"speedup/largest": _shown(max(speedups)), "speedup/median": _shown(median(speedups))}
            if speedups
            else {}
        ),
        **({"drift/error_ratio_largest": _shown(max(ratios))} if ratios else {}),
    }


def recipes_parameter(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the parameter with the recipes of all candidates; none if there is no candidate."""
    names = sorted({candidate.recipe for outcome in outcomes for candidate in outcome.candidates})
    return {"recipes": ", ".join(names)} if names else {}


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary in the JSON form that `mlflow.load_table` reads; infinite values and NaN
    become null.
    """
    rows = [
        [_finite(_summary_row(outcome)[name]) for name in SUMMARY_COLUMNS] for outcome in outcomes
    ]
    return json.dumps({"columns": list(SUMMARY_COLUMNS), "data": rows}, allow_nan=False)


def _summary_row(outcome: Outcome) -> dict[str, Any]:
    figures = outcome.figures
    low, high = figures.speedup_ci or (None, None)
    latency, drift = figures.latency_ms, figures.drift
    return {
        **outcome.for_json_report(),
        "speedup_ci_low": low,
        "speedup_ci_high": high,
        "eager_p50_ms": latency.eager_p50,
        "p50_ms": latency.p50,
        "error_ratio": drift.error_ratio,
        "max_abs_err": drift.max_abs_err,
        "margin": drift.margin,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
