"""Planning: keys, the plan with finished work of earlier campaigns, memory estimates.

May import: pipeline.catalog and below.
Read first: plan.py.
"""

from pipeline.planning.estimates import (
    BASE_BYTES,
    UNUSUAL,
    Demand,
    EarlierSpeeds,
    demand_of,
    learned,
)
from pipeline.planning.finished_work import FinishedWork
from pipeline.planning.keys import (
    BETTER_CPU,
    FileDigests,
    pinned,
    source_key,
)
from pipeline.planning.plan import (
    Item,
    Plan,
    PlanRequest,
    make_plan,
    skipped_outcome,
)

__all__ = [
    "BASE_BYTES",
    "BETTER_CPU",
    "UNUSUAL",
    "Demand",
    "EarlierSpeeds",
    "FileDigests",
    "FinishedWork",
    "Item",
    "Plan",
    "PlanRequest",
    "demand_of",
    "learned",
    "make_plan",
    "pinned",
    "skipped_outcome",
    "source_key",
]
