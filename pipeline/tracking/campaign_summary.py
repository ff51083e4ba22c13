"""What a campaign's own run in MLflow shows: counts, the table of outcomes, digests of them;
and descriptions of campaigns, models and versions in Markdown.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from freezer.artifact import ERROR_RATIO
from freezer.codec import finite
from freezer.errors import FAILED, OK
from freezer.hardware import PORTABLE
from pipeline.ledger import CampaignRecord
from pipeline.records import (
    STYLES,
    Outcome,
    Outcomes,
    Row,
    counts_text,
    outcome_table,
    shortened,
    summarize,
)
from pipeline.tracking.connection import MODELS

NOTE = "mlflow.note.content"
"""Tag of an experiment or run with its description, in Markdown."""


def campaign_description(outcomes: Outcomes) -> str:
    """Describe a campaign in two lines, which MLflow's pages show at once: counts, the largest gain
    and drift. Below them, how to load what gained most.
    """
    summary = summarize(outcomes)
    counts = counts_text(summary.counts.items())
    gain, drifted = next(iter(summary.gains), None), summary.most_drifted
    facts, load = [], ""
    if gain is not None:
        speedup = gain.figures.speedup
        facts.append(f"Largest gain: {gain.model} for {gain.device_class}, **{speedup:.2f}×**")
        load = f"\n\n{_load_snippet(gain)}"
    if drifted is not None:
        facts.append(
            f"Largest drift: {drifted.model} for {drifted.device_class}, error ratio"
            f" {drifted.figures.drift.error_ratio:.2f} ({ERROR_RATIO})"
        )
    return f"**{len(outcomes)} outcomes: {counts or 'none'}**\n\n{' · '.join(facts)}{load}"


def version_description(outcome: Outcome, store: str) -> str:
    """Describe a registered version: how to load it.

    Args:
        outcome: outcome that published it.
        store: URI of the store that contains it.
    """
    load = f"freezer.load({json.dumps(outcome.model)}, store={json.dumps(store)})"
    return f"Frozen from {outcome.source}\n\n{_load_snippet(outcome)}\n\nWithout MLflow: `{load}`"


def _load_snippet(outcome: Outcome) -> str:
    uri = json.dumps(f"{MODELS}{outcome.registered_as}@{outcome.device_class}", ensure_ascii=False)
    return f"```python\nmodel = mlflow.pyfunc.load_model({uri})\n```"


FORM = 4
"""Version of what is logged.

Increase it to invalidate every existing COMPLETE tag; existing runs of candidates stay.
"""


def run_status(record: CampaignRecord) -> str:
    """Return MLflow's status of the run of a campaign that ended."""
    if record.interrupted:
        return "KILLED"
    return "FINISHED" if record.exit_code in (OK, FAILED) else "FAILED"


def campaign_metrics(outcomes: Outcomes) -> dict[str, float]:
    """Count the outcomes by verdict, add up the time of the campaign's own builds and judges, and
    sum up what was published.
    """
    fresh = [outcome for outcome in outcomes if not outcome.cached]
    counts = dict.fromkeys(STYLES, 0) | Counter(outcome.verdict for outcome in outcomes)
    timed = [
        Row.of(outcome)
        for outcome in outcomes
        if outcome.verdict == "published" and outcome.device_class != PORTABLE
    ]
    speedups = [row.speedup for row in timed if row.speedup and not row.mark]
    drifted = summarize(outcomes).most_drifted
    metrics = {f"outcomes/{verdict}": float(count) for verdict, count in counts.items()}
    metrics["outcomes/total"] = float(len(outcomes))
    metrics["outcomes/unchanged"] = float(len(outcomes) - len(fresh))
    metrics["build_s/total"] = round(sum(outcome.build_s for outcome in fresh), 1)
    metrics["judge_s/total"] = round(sum(outcome.judge_s for outcome in fresh), 1)
    if speedups:
        metrics["speedup/largest"] = shortened(max(speedups))
        metrics["speedup/median"] = shortened(median(speedups))
    if drifted is not None and drifted.figures.drift.error_ratio is not None:
        metrics["drift/error_ratio_largest"] = shortened(drifted.figures.drift.error_ratio)
    return metrics


def summary_table(outcomes: Outcomes) -> str:
    """Return the summary as a JSON table; infinite values and NaN become null."""
    return json.dumps(finite(outcome_table(outcomes)), allow_nan=False)


def outcomes_digest(outcomes: Iterable[Outcome]) -> str:
    """Digest what is logged and registered for outcomes, ignoring `cached` and the outcomes of bad
    entries.
    """
    digest = hashlib.sha256(str(FORM).encode())
    for outcome in sorted(outcomes, key=lambda outcome: outcome.place):
        if outcome.judge_key:
            shown = replace(outcome, cached=False).to_json()
            digest.update(json.dumps(shown, sort_keys=True, default=str).encode())
    return digest.hexdigest()
