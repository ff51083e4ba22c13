"""Failures: classify exceptions, and decide what is retried.

May import: pipeline.records.
Read first: policy.py.
"""

from pipeline.failures.classification import (
    CODES,
    GPU_MEMORY,
    NODE_MEMORY,
    classify,
    coded_failure,
)
from pipeline.failures.policy import (
    LIFT,
    MOST_STARTS,
    TIMEOUT_STARTS,
    attempts_left,
    decide,
    final_sentence,
    is_kept,
    kept_after,
    kind_of_ray,
    retry_rank,
)

__all__ = [
    "CODES",
    "GPU_MEMORY",
    "LIFT",
    "MOST_STARTS",
    "NODE_MEMORY",
    "TIMEOUT_STARTS",
    "attempts_left",
    "classify",
    "coded_failure",
    "decide",
    "final_sentence",
    "is_kept",
    "kept_after",
    "kind_of_ray",
    "retry_rank",
]
