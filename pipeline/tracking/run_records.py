"""What MLflow is told about an outcome: one record for each run, and the campaign's summary. Pure functions; no mlflow.

Every tag of ours starts with `coldpress.`, and takes the place of an entry's own tag of that name; metric names hold a `/`, which
makes them sections in MLflow's pages.
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
from typing import Any, Literal

from freezer.artifact.describe_report import figures_text
from freezer.artifact.folder import MANIFEST
from freezer.artifact.manifest import Manifest
from freezer.artifact.markdown import FREEZING, freezing_markdown
from pipeline.records.outcome import CandidateReport, Outcome

NO_RECIPE = "none"
"""The recipe of the one run of an outcome without candidates."""

MAX_TAG_NAME_CHARS = 250
MAX_TAG_CHARS = 1000
"""Far below the limit of any MLflow server; longer ones would be hard to read in a table anyway."""

SUMMARY_COLUMNS = (
    *("model", "device_class", "verdict", "cached", "recipe"),
    *("speedup", "speedup_ci_low", "speedup_ci_high", "eager_p50_ms", "p50_ms"),
    *("error_ratio", "max_abs_err", "margin", "num_threads", "version", "artifact", "build_s", "judge_s", "reason"),
)
MARKDOWN_HEAD = (
    "| model | device class | verdict | recipe | speedup (95% interval) | eager p50, ms | p50, ms | error ratio | reason |"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What one run holds.

    Attributes:
        digest: of everything that the run shows; a run with another digest is out of date.
        texts: artifacts, by path in the run.
        duration_s: wall time of the build.
    """

    recipe: str
    name: str
    digest: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    texts: Mapping[str, str]
    status: Literal["FINISHED", "FAILED"]
    duration_s: float


def free_tags(outcome: Outcome) -> dict[str, str]:
    """The tags of the entry, as runs and registered versions take them: what MLflow refuses or reserves in a name becomes `_`."""
    tags: dict[str, str] = {}
    for given, text in outcome.tags.items():
        name = re.sub(r"[^\w\-. :/]", "_", given)[:MAX_TAG_NAME_CHARS] or "_"
        if posixpath.normpath(name) != name or name.startswith((".", "/", "mlflow.")):
            name = re.sub(r"[./]", "_", name)
        tags[name] = _cut(text)
    return tags


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TAG_CHARS else f"{text[: MAX_TAG_CHARS - 1]}…"


def run_records(outcome: Outcome, campaign: str, manifest: Manifest | None) -> tuple[RunRecord, ...]:
    """One record for each candidate of an outcome; one for an outcome that has none.

    Args:
        outcome: of one model and device class.
        campaign: whose run this is.
        manifest: of the artifact, which the run of the recipe that made it holds.
    """
    if outcome.candidates:
        return tuple(_candidate_record(outcome, candidate, campaign, manifest) for candidate in outcome.candidates)
    why = {"problem": outcome.reason or outcome.failure or outcome.verdict, "failure": outcome.failure, "code": outcome.code}
    name = f"{outcome.model} · {outcome.device_class} · {_verdict_text(outcome)}"
    return (
        RunRecord(
            recipe=NO_RECIPE,
            name=name,
            digest=_digest(outcome, NO_RECIPE),
            tags=_tags(outcome, NO_RECIPE, campaign) | _present(why),
            params=_params(outcome),
            metrics={},
            texts={"log.txt": outcome.log_tail} if outcome.log_tail else {},
            status="FAILED" if outcome.failed else "FINISHED",
            duration_s=outcome.build_s + outcome.judge_s,
        ),
    )


def _candidate_record(outcome: Outcome, candidate: CandidateReport, campaign: str, manifest: Manifest | None) -> RunRecord:
    own = {
        "problem": candidate.problem,
        "failure": candidate.failure,
        "code": outcome.code,
        "build_key": candidate.build_key,
        "winner": str(outcome.verdict == "published" and candidate.recipe == outcome.recipe).lower(),
    }
    texts = {"warnings.txt": "\n".join(candidate.warnings)} if candidate.warnings else {}
    if candidate.reports:
        texts[FREEZING] = freezing_markdown(
            title=f"{outcome.model} for {outcome.device_class}, {candidate.recipe}",
            verdict=_candidate_verdict(candidate),
            tried=candidate.tried,
            reports=candidate.reports,
            strides_equal=candidate.strides_equal,
            migration=candidate.migration,
        )
    if candidate.failure and outcome.log_tail:
        texts["log.txt"] = outcome.log_tail
    if manifest is not None and (manifest.device_class, manifest.recipe.get("name")) == (outcome.device_class, candidate.recipe):
        texts[MANIFEST] = manifest.to_bytes().decode()
    return RunRecord(
        recipe=candidate.recipe,
        name=f"{outcome.model} · {outcome.device_class} · {candidate.recipe}",
        digest=_digest(outcome, candidate.recipe),
        tags=_tags(outcome, candidate.recipe, campaign) | _present(own),
        params=_params(outcome) | {"recipe": candidate.recipe, "capture": candidate.capture or "none"},
        metrics=_metrics(outcome, candidate),
        texts=texts,
        status="FAILED" if candidate.failure else "FINISHED",
        duration_s=candidate.build_s,
    )


def _candidate_verdict(candidate: CandidateReport) -> str:
    if candidate.problem:
        return f"Does not pass: {candidate.problem}"
    return f"Passes: {figures_text(candidate.speedup, (candidate.drift or {}).get('error_ratio'))}"


def _tags(outcome: Outcome, recipe: str, campaign: str) -> dict[str, str]:
    return free_tags(outcome) | _present(
        {
            "campaign": campaign,
            "kind": "candidate",
            "model": outcome.model,
            "device_class": outcome.device_class,
            "recipe": recipe,
            "verdict": outcome.verdict,
            "cached": str(outcome.cached).lower(),
            "source_key": outcome.source_key,
            "judge_key": outcome.judge_key,
            "artifact": outcome.artifact,
            "version": None if outcome.version is None else str(outcome.version),
            "host": str(outcome.host.get("cpu") or "") or None,
            "outcome": _digest(outcome, recipe),
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


def _metrics(outcome: Outcome, candidate: CandidateReport) -> dict[str, float]:
    found: dict[str, float | None] = {f"drift/{name}": value for name, value in (candidate.drift or {}).items()}
    found |= {f"latency_ms/{name}": value for name, value in (candidate.latency_ms or {}).items()}
    if candidate.latency_ms and outcome.latency_ms:
        found["latency_ms/eager_p50"] = outcome.latency_ms.get("eager_p50")
    found["speedup/value"] = candidate.speedup
    if candidate.speedup_ci:
        found["speedup/ci_low"], found["speedup/ci_high"] = candidate.speedup_ci
    if candidate.num_payloads:
        found["size_mb/payloads"] = candidate.size_bytes / 1e6
    found["build_s/total"] = candidate.build_s
    found["task_metric/value"] = candidate.task_metric
    if candidate.task_metric is not None and outcome.task_metric:
        found["task_metric/eager"] = outcome.task_metric.get("eager")
    return {name: float(value) for name, value in {**found, **_point_metrics(candidate)}.items() if value is not None}


def _point_metrics(candidate: CandidateReport) -> dict[str, float | None]:
    """What serves at each thread count and point that was timed: `latency_ms/threads 1 batch 8/p50`. Nothing where that is one."""
    serves: dict[str, Mapping[str, Any]] = {}
    for item in candidate.points:
        sizes = [f"{name} {size}" for name, size in item["point"].items()]
        serves.setdefault(" ".join([f"threads {item['threads']}", *sizes]), item)  # of several payloads the first serves
    found: dict[str, float | None] = {}
    for place, item in serves.items() if len(serves) > 1 else ():
        found |= {f"latency_ms/{place}/{name}": item[name] for name in ("eager_p50", "p50", "p90", "p99") if name in item}
        found[f"speedup/{place}"] = item["speedup"]
    return found


def _digest(outcome: Outcome, recipe: str) -> str:
    """Of an outcome and one of its recipes. Whether it is cached does not count: a resumed campaign takes over its own outcomes."""
    content = {**outcome.to_json(), "cached": False, "of_recipe": recipe}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _verdict_text(outcome: Outcome) -> str:
    return f"{outcome.verdict}: {outcome.failure}" if outcome.failure else outcome.verdict


def campaign_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Counts for each verdict, and the time that the campaign's own builds and judges took."""
    fresh = [outcome for outcome in outcomes if not outcome.cached]
    counts = Counter(outcome.verdict for outcome in outcomes)
    return {
        **{f"outcomes/{verdict}": float(count) for verdict, count in counts.items()},
        "outcomes/total": float(len(outcomes)),
        "outcomes/unchanged": float(len(outcomes) - len(fresh)),
        "build_s/total": sum(outcome.build_s for outcome in fresh),
        "judge_s/total": sum(outcome.judge_s for outcome in fresh),
    }


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """JSON in the form that `mlflow.log_table` writes and `mlflow.load_table` reads; what is infinite or NaN is null."""
    rows = [[_finite(_summary_row(outcome)[name]) for name in SUMMARY_COLUMNS] for outcome in outcomes]
    return json.dumps({"columns": list(SUMMARY_COLUMNS), "data": rows}, allow_nan=False)


def _summary_row(outcome: Outcome) -> dict[str, Any]:
    low, high = outcome.speedup_ci or (None, None)
    latency, drift = outcome.latency_ms or {}, outcome.drift or {}
    return {
        **outcome.for_json_report(),
        "speedup_ci_low": low,
        "speedup_ci_high": high,
        "eager_p50_ms": latency.get("eager_p50"),
        "p50_ms": latency.get("p50"),
        **{name: drift.get(name) for name in ("error_ratio", "max_abs_err", "margin")},
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_markdown(outcomes: Sequence[Outcome], campaign: str, *, exit_code: int, interrupted: bool) -> str:
    """The summary for people: counts, then one row for each outcome."""
    counts = Counter("unchanged" if outcome.cached else outcome.verdict for outcome in outcomes)
    said = ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "no outcomes"
    ended = "interrupted" if interrupted else f"exit code {exit_code}"
    head = f"# Campaign {campaign}\n\n{len(outcomes)} outcomes ({said}); {ended}.\n"
    lines = [MARKDOWN_HEAD, "|" + "---|" * (MARKDOWN_HEAD.count("|") - 1)]
    lines += [f"| {' | '.join(_markdown_cells(outcome))} |" for outcome in outcomes]
    return "\n".join([head, *lines, ""])


def _markdown_cells(outcome: Outcome) -> tuple[str, ...]:
    latency, drift = outcome.latency_ms or {}, outcome.drift or {}
    speedup = "" if outcome.speedup is None else f"{outcome.speedup:.2f}"
    if outcome.speedup_ci:
        speedup += f" ({outcome.speedup_ci[0]:.2f} to {outcome.speedup_ci[1]:.2f})"
    reason = " ".join((outcome.reason or "").split()).replace("|", "\\|")
    return (
        outcome.model,
        outcome.device_class,
        _verdict_text(outcome) + (" (unchanged)" if outcome.cached else ""),
        outcome.recipe or "",
        speedup,
        _figure(latency.get("eager_p50")),
        _figure(latency.get("p50")),
        _figure(drift.get("error_ratio")),
        reason if len(reason) <= 160 else f"{reason[:159]}…",
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
