"""Contents of MLflow runs: one record for each candidate, or for an outcome without candidates.
Pure functions; no mlflow.

Coldpress tags start with `coldpress.` and override an entry's own tag of the same name. A `/` in a
metric name makes a section in MLflow's pages.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Literal

from freezer.artifact import UNMEASURED, PointFigures
from freezer.artifact.description import (
    FREEZING,
    describe_freezing,
    figures_text,
    freezing_markdown,
)
from freezer.artifact.explanation import Explanation
from freezer.codec import encode, frozen
from pipeline.records import SKIPPED, CandidateReport, Outcome, shortened

NO_RECIPE = "none"
"""Recipe of the single run of an outcome without candidates."""

OUTCOME = "coldpress.outcome"
"""Tag with the digest of a run's contents."""

ARTIFACT = "coldpress.artifact"
"""Tag with the artifact's digest. A version that has it is frozen, and never a source."""

VERSION = "coldpress.version"
"""Tag with the newest version of the store that contains the artifact."""

STORE = "coldpress.store"

CAMPAIGN = "coldpress.campaign"
"""Tag of a run, and of a logged model, with the campaign that writes it."""

KIND, FROZEN = "coldpress.kind", "frozen"
"""Tag of a registered model that Coldpress created, and its value."""

_Metrics = dict[str, float | None]
"""By name; None where nothing was measured."""

MAX_TAG_NAME_CHARS = 250
MAX_TAG_CHARS = 1000
"""Below the limits of every MLflow server."""


@frozen
class RunRecord:
    """Contents of one run.

    Attributes:
        texts: text files by name.
        explanation: where drift enters, for a plot; None if unknown.
        duration_s: wall time of the build.
    """

    recipe: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    texts: Mapping[str, str]
    status: Literal["FINISHED", "FAILED"]
    duration_s: float
    explanation: Explanation | None = None

    @property
    def digest(self) -> str:
        """Digest of all contents; a run with another digest is out of date."""
        return self.tags[OUTCOME]


def free_tags(outcome: Outcome) -> dict[str, str]:
    """Return the entry's tags for runs and registered versions; characters that MLflow rejects or
    reserves in names become `_`.
    """
    tags = {}
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
    ending = f"{outcome.verdict}: {kind}" if kind else outcome.verdict
    return (
        RunRecord(
            recipe=NO_RECIPE,
            name=f"{outcome.model} · {outcome.device_class} · {ending}",
            tags=_tags(outcome, NO_RECIPE, campaign),
            params=_params(outcome),
            metrics={},
            texts={"log.txt": outcome.log_tail} if outcome.log_tail else {},
            status="FAILED" if outcome.failed else "FINISHED",
            duration_s=outcome.build_s + outcome.judge_s,
        ),
    )


def _candidate_record(outcome: Outcome, candidate: CandidateReport, campaign: str) -> RunRecord:
    won = outcome.verdict == "published" and candidate.recipe == outcome.recipe
    reason = None if outcome.verdict == "published" else outcome.coded_reason
    own = {"problem": candidate.problem or reason, "winner": str(won).lower()}
    texts = {}
    if candidate.reports:
        title = f"{outcome.model} for {outcome.device_class}, {candidate.recipe}"
        rows = describe_freezing(
            candidate.freezing,
            candidate.tried,
            accuracy=candidate.accuracy,
        )
        texts[FREEZING] = freezing_markdown(title, _candidate_verdict(outcome, candidate), rows)
    if candidate.explanation:
        texts["explained.txt"] = candidate.explanation.text()
    if candidate.failure and outcome.log_tail:
        texts["log.txt"] = outcome.log_tail
    return RunRecord(
        recipe=candidate.recipe,
        name=f"{outcome.model} · {outcome.device_class} · {candidate.recipe}",
        tags=_tags(outcome, candidate.recipe, campaign) | _present(own),
        params=_params(outcome) | _candidate_params(candidate),
        metrics=_metrics(outcome, candidate),
        texts=texts,
        explanation=candidate.explanation,
        status="FAILED" if candidate.failure else "FINISHED",
        duration_s=candidate.build_s,
    )


def _candidate_verdict(outcome: Outcome, candidate: CandidateReport) -> str:
    if candidate.problem:
        return f"Does not pass: {candidate.problem}"
    figures = candidate.figures
    return f"Passes: {figures_text(figures.speedup, figures.drift.error_ratio, outcome.clock)}"


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
            "code": outcome.code,
            "artifact": outcome.artifact,
            "version": None if outcome.version is None else str(outcome.version),
            "outcome": _digest(outcome, recipe),
        }
    )


def _present(tags: Mapping[str, str | None]) -> dict[str, str]:
    return {f"coldpress.{name}": _cut(text) for name, text in tags.items() if text}


def _params(outcome: Outcome) -> dict[str, str]:
    return {"source": outcome.source, "num_threads": str(outcome.num_threads)}


def _candidate_params(candidate: CandidateReport) -> dict[str, str]:
    params = {"capture": candidate.capture or "none"}
    if accuracy := candidate.accuracy:
        params |= {"precision": accuracy.precision, "samples": accuracy.digest or "generated"}
        params["budget"] = ", ".join(f"{name} {limit:g}" for name, limit in accuracy.budget.items())
    if candidate.points and candidate.points[0].point:
        point = candidate.points[0].point
        params["point"] = ", ".join(f"{name} {size}" for name, size in point.items())
    return params


def _metrics(outcome: Outcome, candidate: CandidateReport) -> dict[str, float]:
    measured = candidate.figures
    metrics: _Metrics = {}
    for section, figures in (("drift", measured.drift), ("latency_ms", measured.latency_ms)):
        for name, value in encode(figures).items():
            metrics[f"{section}/{name}"] = value
    if measured.latency_ms != UNMEASURED.latency_ms:
        metrics["latency_ms/eager_p50"] = outcome.figures.latency_ms.eager_p50
    metrics["speedup/value"] = measured.speedup
    if measured.speedup_ci:
        metrics["speedup/ci_low"], metrics["speedup/ci_high"] = measured.speedup_ci
    clocks = [point.clock for point in candidate.points] or [outcome.clock]
    if measured.speedup is not None and "disturbed" in clocks:
        metrics["speedup/disturbed"] = 1.0  # as `~` elsewhere
    if outcome.previous is not None and candidate.recipe == outcome.recipe:
        metrics["speedup/over_previous"] = outcome.previous.speedup
    if candidate.num_payloads:
        metrics["size_mb/payloads"] = candidate.size_bytes / 1e6
    for tradeoff in outcome.pareto:
        if tradeoff.recipe == candidate.recipe:
            metrics["load_ms/first_answer"] = tradeoff.load_ms
            metrics["memory_mb/added"] = tradeoff.memory_mb
    metrics["build_s/total"] = candidate.build_s
    metrics["task_metric/value"] = candidate.task_metric
    if candidate.task_metric is not None and outcome.task_metric:
        metrics["task_metric/eager"] = outcome.task_metric.get("eager")
    metrics |= _accuracy_metrics(candidate) | _point_metrics(candidate)
    return {name: shortened(value) for name, value in metrics.items() if value is not None}


def _accuracy_metrics(candidate: CandidateReport) -> _Metrics:
    """What a lower precision costs, as measured and as bounded."""
    metrics: _Metrics = {}
    if candidate.accuracy is not None:
        for name, value in candidate.accuracy.measured.items():
            metrics[f"accuracy/{name}"] = value
            metrics[f"accuracy/{name}_bound"] = candidate.accuracy.bounds[name]
    return metrics


def _point_metrics(candidate: CandidateReport) -> _Metrics:
    """Return metrics for each timed thread count and point, like `latency_ms/threads 1 batch
    8/p50`; none if there is only one.
    """
    serves: dict[str, PointFigures] = {}
    for point in candidate.points:
        sizes = [f"{name} {size}" for name, size in point.point.items()]
        place = " ".join([f"threads {point.num_threads}", *sizes])
        serves.setdefault(place, point)  # the first of several payloads serves
    if len(serves) < 2:
        return {}
    metrics: _Metrics = {}
    for place, point in serves.items():
        for name in ("eager_p50", "p50", "p90", "p99"):
            metrics[f"latency_ms/{place}/{name}"] = getattr(point, name)
        metrics[f"speedup/{place}"] = point.speedup
    return metrics


def _digest(outcome: Outcome, recipe: str) -> str:
    """Digest an outcome and one of its recipes, ignoring `cached`: a resumed campaign takes its own
    outcomes from the ledger.
    """
    content = {**outcome.to_json(), "cached": False, "of_recipe": recipe}
    # A field of earlier releases: without it, all their runs would count as out of date.
    content["candidates"] = [{**report, "migration": None} for report in content["candidates"]]
    return hashlib.sha256(
        json.dumps(
            content,
            sort_keys=True,
            default=str,
        ).encode()
    ).hexdigest()
