"""The memory of a machine: what a container's control groups leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freezer.hardware.cgroups import machine_bytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("kind", "controllers", "name", "text", "expected"),
    [
        ("cgroup2", "0::/pod/worker", "memory.max", "1000000\n", 1_000_000),
        ("cgroup2", "0::/pod/worker", "memory.max", "max\n", PHYSICAL),
        ("cgroup", "4:memory:/pod/worker", "memory.limit_in_bytes", "2000000\n", 2_000_000),
        ("cgroup", "4:memory:/pod/worker", "memory.limit_in_bytes", "9223372036854771712\n", PHYSICAL),
        ("cgroup", "4:cpu:/pod/worker", "memory.limit_in_bytes", "2000000\n", PHYSICAL),
    ],
)
@pytest.mark.parametrize("group", ["pod", "pod/worker"])
def test_limits_of_a_group_and_of_those_above_count(
    tmp_path: Path, group: str, kind: str, controllers: str, name: str, text: str, expected: int
) -> None:
    controller = "cpu" if ":cpu:" in controllers else "memory"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{controllers}\n")
    mount = f"30 23 0:26 / /sys/fs/cgroup/here rw - {kind} {kind} rw,{controller}\n"
    (tmp_path / "proc" / "self" / "mountinfo").write_text(mount)
    folder = tmp_path / "sys" / "fs" / "cgroup" / "here"
    (folder / "pod" / "worker").mkdir(parents=True)
    (folder / group / name).write_text(text)
    assert machine_bytes(tmp_path) == expected


def test_this_machine_has_memory() -> None:
    assert 10**8 < machine_bytes() <= PHYSICAL
