"""What a campaign's own run in MLflow shows: counts, the table of outcomes, and digests of them. Pure
functions; mlflow is imported where it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from freezer.hardware import PORTABLE
from pipeline.records import Outcome, Row
from pipeline.tracking.run_records import shortened

if TYPE_CHECKING:
    from mlflow.entities import Dataset

FORM = 2
"""Version of what is logged.

Increase it to invalidate every existing COMPLETE and SHOWN tag; existing runs of candidates stay.
"""

SUMMARY_COLUMNS = (
    "model",
    "device_class",
    "verdict",
    "cached",
    "recipe",
    "speedup",
    "speedup_ci_low",
    "speedup_ci_high",
    "eager_p50_ms",
    "p50_ms",
    "error_ratio",
    "max_abs_err",
    "margin",
    "num_threads",
    "version",
    "artifact",
    "build_s",
    "judge_s",
    "reason",
)


def campaign_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Count the outcomes by verdict, add up the time of the campaign's own builds and judges, and
    sum up what was published.
    """
    fresh = [outcome for outcome in outcomes if not outcome.cached]
    counts = Counter(outcome.verdict for outcome in outcomes)
    published = [Row.of(outcome) for outcome in outcomes if outcome.verdict == "published"]
    timed = [row for row in published if row.device_class != PORTABLE]
    speedups = [row.speedup for row in timed if row.speedup]
    ratios = [row.error_ratio for row in published if row.error_ratio is not None]
    metrics = {f"outcomes/{verdict}": float(count) for verdict, count in counts.items()}
    metrics["outcomes/total"] = float(len(outcomes))
    metrics["outcomes/unchanged"] = float(len(outcomes) - len(fresh))
    metrics["build_s/total"] = round(sum(outcome.build_s for outcome in fresh), 1)
    metrics["judge_s/total"] = round(sum(outcome.judge_s for outcome in fresh), 1)
    if speedups:
        metrics["speedup/largest"] = shortened(max(speedups))
        metrics["speedup/median"] = shortened(median(speedups))
    if ratios:
        metrics["drift/error_ratio_largest"] = shortened(max(ratios))
    return metrics


def recipes_parameter(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the parameter with the recipes of all candidates; none if there is no candidate."""
    names = sorted({candidate.recipe for outcome in outcomes for candidate in outcome.candidates})
    return {"recipes": ", ".join(names)} if names else {}


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """Return the summary in the JSON form that `mlflow.load_table` reads; infinite values and NaN
    become null.
    """
    rows = []
    for outcome in outcomes:
        row = replace(Row.of(outcome), reason=outcome.coded_reason)
        rows.append([_finite(getattr(row, name)) for name in SUMMARY_COLUMNS])
    return json.dumps({"columns": list(SUMMARY_COLUMNS), "data": rows}, allow_nan=False)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def outcomes_digest(outcomes: Iterable[Outcome]) -> str:
    """Digest what is logged and registered for outcomes, ignoring `cached` and the outcomes of bad
    entries.
    """
    digest = hashlib.sha256(str(FORM).encode())
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.model, outcome.device_class)):
        if outcome.judge_key:
            shown = {**outcome.to_json(), "cached": False}
            facts = [shown, outcome.judge_key, outcome.registered_as, sorted(outcome.tags.items())]
            digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def summary_digest(outcomes: Sequence[Outcome], *ending: object) -> str:
    digest = hashlib.sha256(repr((FORM, *ending)).encode())
    for outcome in outcomes:
        digest.update(json.dumps(outcome.to_json(), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def catalog_dataset(catalog: str, outcomes: Sequence[Outcome]) -> Dataset:
    """Return a catalog as MLflow's dataset; its digest changes with the sources of its models."""
    from mlflow.entities import Dataset

    models = {outcome.model: outcome.source_key for outcome in outcomes}
    digest = hashlib.sha256(json.dumps(sorted(models.items())).encode()).hexdigest()[:8]
    profile = json.dumps({"num_models": len(models), "num_outcomes": len(outcomes)})
    return Dataset(
        Path(catalog).name, digest, "local", json.dumps({"uri": catalog}), profile=profile
    )
