"""Workspace: folders of work in progress, checksums of candidates, process trees.

May import: pipeline.failures and below.
Read first: work_folders.py.
"""

from pipeline.workspace.machine_time import (
    COMPUTES,
    WAITS,
    MachineShare,
    alone,
    computing,
    is_measured,
)
from pipeline.workspace.processes import (
    KILL_WAIT_S,
    be_nice,
    become_subreaper,
    boot_id,
    children,
    descendants,
    die_with,
    kill,
    kill_descendants,
    oom_score,
    process_namespace,
    process_started,
    reap,
    signal_all,
    tree_bytes,
)
from pipeline.workspace.staging import (
    move_whole,
    own_path,
    remove_abandoned,
    remove_tree,
    staging_folder,
)
from pipeline.workspace.work_folders import (
    ARCHITECTURE,
    Workplace,
    architecture_of,
    damage_of,
    judged_name,
    log_path,
    log_place,
    note_digests,
    workplace,
)

__all__ = [
    "ARCHITECTURE",
    "COMPUTES",
    "KILL_WAIT_S",
    "WAITS",
    "MachineShare",
    "Workplace",
    "alone",
    "architecture_of",
    "be_nice",
    "become_subreaper",
    "boot_id",
    "children",
    "computing",
    "damage_of",
    "descendants",
    "die_with",
    "is_measured",
    "judged_name",
    "kill",
    "kill_descendants",
    "log_path",
    "log_place",
    "move_whole",
    "note_digests",
    "oom_score",
    "own_path",
    "process_namespace",
    "process_started",
    "reap",
    "remove_abandoned",
    "remove_tree",
    "signal_all",
    "staging_folder",
    "tree_bytes",
    "workplace",
]
