"""Descriptions of campaigns, registered models and versions: Markdown for MLflow's pages. Pure
functions; no mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from freezer.artifact import ERROR_RATIO
from pipeline.records import Outcome, summarize
from pipeline.tracking.connection import MODELS

NOTE = "mlflow.note.content"
"""Tag of an experiment or run with its description, in Markdown."""


def campaign_description(outcomes: Sequence[Outcome]) -> str:
    """Describe a campaign in two lines, which MLflow's pages show at once: counts, the largest gain
    and drift. Below them, how to load what gained most.
    """
    summary = summarize(outcomes)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary.counts.items())
    gain, drifted = next(iter(summary.gains), None), summary.most_drifted
    facts, load = [], ""
    if gain is not None:
        speedup = f"**{gain.figures.speedup:.2f}×**"
        facts.append(f"Largest gain: {gain.model} for {gain.device_class}, {speedup}")
        load = f"\n\n{_load_snippet(gain)}"
    if drifted is not None:
        ratio = f"error ratio {drifted.figures.drift.error_ratio:.2f} ({ERROR_RATIO})"
        facts.append(f"Largest drift: {drifted.model} for {drifted.device_class}, {ratio}")
    return f"**{len(outcomes)} outcomes: {counts or 'none'}**\n\n{' · '.join(facts)}{load}"


def model_description(outcome: Outcome) -> str:
    """Describe the registered model of an outcome."""
    return (
        f"Frozen by Coldpress from {outcome.source}. Each alias is a device class, and points to"
        " the artifact that serves it."
    )


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
