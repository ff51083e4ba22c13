"""Drift: the reference outputs, and the distance of a candidate's outputs from them.

Knows neither candidates nor clocks.
"""

from freezer.compare import Gate
from freezer.freezing.drift.distributions import distribution_problem, sampled
from freezer.freezing.drift.drift import STRIDES, assess
from freezer.freezing.drift.drift_report import DriftReport, DriftRow, report
from freezer.freezing.drift.extremes import Extreme, extremes_of
from freezer.freezing.drift.float64_mode import Widening, own_dtype, widening
from freezer.freezing.drift.reference import Reference, run_reference
from freezer.freezing.drift.runs import Call, Fresh, Runner, copied, eager_reruns, run_calls
from freezer.freezing.drift.ties import at_ties

__all__ = [
    "STRIDES",
    "Call",
    "DriftReport",
    "DriftRow",
    "Extreme",
    "Fresh",
    "Gate",
    "Reference",
    "Runner",
    "Widening",
    "assess",
    "at_ties",
    "copied",
    "distribution_problem",
    "eager_reruns",
    "extremes_of",
    "own_dtype",
    "report",
    "run_calls",
    "run_reference",
    "sampled",
    "widening",
]
