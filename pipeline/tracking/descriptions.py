"""Descriptions of campaigns, registered models and versions: Markdown for MLflow's pages. Pure
functions; no mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.records import Outcome, summarize
from pipeline.tracking.connection import MODELS

NOTE = "mlflow.note.content"
"""Tag of an experiment or run with its description, in Markdown."""


def campaign_description(outcomes: Sequence[Outcome]) -> str:
    """Describe a campaign: counts, the largest gain and how to load it. Its report has the rest."""
    summary = summarize(outcomes)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary.counts.items())
    text = f"**{len(outcomes)} outcomes: {counts or 'none'}**"
    if not summary.gains:
        return text
    gain = summary.gains[0]
    speedup = f"**{gain.figures.speedup:.2f}×**"
    return (
        f"{text}\n\nLargest gain: {gain.model} for {gain.device_class}, {speedup}\n\n"
        f"{_load_snippet(gain)}"
    )


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
