"""Records: outcomes, failures, figures and events that all other packages share.

May import: freezer.
Read first: outcome.py.
"""

from pipeline.records.outcome import (
    SKIPPED,
    SOURCE_MODEL,
    SOURCE_VERSION,
    CandidateReport,
    Failure,
    FinishedBuild,
    Outcome,
    OutputDrift,
    flat_json,
    nested_json,
)
from pipeline.records.row import (
    EMULATED,
    LABEL,
    STYLES,
    ClassFacts,
    Event,
    LiveFigures,
    Row,
    Summary,
    alike,
    iso,
    labels_of,
    outcome_table,
    rounded,
    speedup_text,
    summarize,
    verdict_name,
    verdict_text,
)

__all__ = [
    "EMULATED",
    "LABEL",
    "SKIPPED",
    "SOURCE_MODEL",
    "SOURCE_VERSION",
    "STYLES",
    "CandidateReport",
    "ClassFacts",
    "Event",
    "Failure",
    "FinishedBuild",
    "LiveFigures",
    "Outcome",
    "OutputDrift",
    "Row",
    "Summary",
    "alike",
    "flat_json",
    "iso",
    "labels_of",
    "nested_json",
    "outcome_table",
    "rounded",
    "speedup_text",
    "summarize",
    "verdict_name",
    "verdict_text",
]
