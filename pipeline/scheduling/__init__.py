"""Scheduling: the state machine of items, queues, the fleet and the executor.

May import: pipeline.worker and below.
Read first: item_state.py, then executor.py.
"""

from pipeline.scheduling.build_records import BuildRecords
from pipeline.scheduling.executor import Executor
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.item_state import ItemState
from pipeline.scheduling.node_check import SharedFiles, facts_here, with_memory_here
from pipeline.scheduling.outcomes import Decided, folder_name, skipped_outcomes

__all__ = [
    "BuildRecords",
    "Decided",
    "Executor",
    "Fleet",
    "ItemState",
    "SharedFiles",
    "facts_here",
    "folder_name",
    "skipped_outcomes",
    "with_memory_here",
]
