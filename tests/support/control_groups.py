"""Files of /proc and /sys for a process in control groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
"""Mount of the groups of version 2."""


def group_tree(root: Path, group: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A root folder with the groups of this process, mounts, and files by their path below
    /sys/fs/cgroup.
    """
    texts = {"proc/self/cgroup": group, "proc/self/mountinfo": mounts}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
