"""CPU quotas and memory limits, from files and from a real control group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from freezer.hardware import available_cpus, machine_bytes, thread_budget
from freezer.hardware.resources import cpu_quota
from tests.support.commands import output
from tests.support.control_groups import V2, group_tree

AFFINITY = len(os.sched_getaffinity(0))
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1 = "35 30 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "36 30 0:32 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n"
DOCKER = "733 722 0:26 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"


def of_v1(quota: int) -> dict[str, str]:
    folder = "cpu,cpuacct/x"
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("group", "mounts", "files", "quota"),
    [
        ("0::/a\n", V2, {"a/cpu.max": "max 100000\n"}, None),
        ("0::/a\n", V2, {"a/cpu.max": "150000 100000\n"}, 1.5),
        (
            "0::/a/b\n",
            V2,
            {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"},
            2.0,
        ),
        ("0::/docker/abc\n", DOCKER, {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/host/name\n", V2, {"cpu.max": "300000 100000\n"}, 3.0),
        ("4:memory:/m\n3:cpu,cpuacct:/x\n", MEMORY + V1, of_v1(400_000), 4.0),
        ("3:cpu,cpuacct:/x\n", V1, of_v1(-1), None),
        ("0::/a\n", V2, {"a/cpu.max": "many 100000\n"}, None),
    ],
    ids=[
        *("max", "own", "above", "mounted-from-below", "another-namespace"),
        *("v1", "v1-none", "unreadable"),
    ],
)
def test_the_smallest_quota_counts(
    tmp_path: Path, group: str, mounts: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(group_tree(tmp_path, group, mounts, files)) == quota


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("50000", 1), ("100000", 1), ("150000", 1), ("9900000", AFFINITY), ("max", AFFINITY)],
)
def test_threads_within_affinity_and_quota(tmp_path: Path, quota: str, expected: int) -> None:
    root = group_tree(tmp_path, "0::/a\n", V2, {"a/cpu.max": f"{quota} 100000\n"})
    assert available_cpus(root) == thread_budget(AFFINITY + 7, root) == expected
    assert thread_budget(1, root) == 1


def test_a_real_quota_is_detected(limited_group: Path) -> None:
    code = (
        "import os, sys\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from freezer.hardware.resources import available_cpus, cpu_quota\n"
        "print(cpu_quota(), available_cpus())\n"
    )
    printed = output(sys.executable, "-c", code, limited_group / "cgroup.procs")
    assert printed.split() == ["1.0", "1"]


@pytest.mark.parametrize(
    ("group", "mounts", "name", "text", "expected"),
    [
        ("0::/a/b\n", V2, "memory.max", "1000000\n", 1_000_000),
        ("0::/a/b\n", V2, "memory.max", "max\n", PHYSICAL),
        ("4:memory:/a/b\n", MEMORY, "memory.limit_in_bytes", "2000000\n", 2_000_000),
        ("4:memory:/a/b\n", MEMORY, "memory.limit_in_bytes", "9223372036854771712\n", PHYSICAL),
        ("4:cpu:/a/b\n", V1, "memory.limit_in_bytes", "2000000\n", PHYSICAL),
    ],
)
@pytest.mark.parametrize("limited", ["a", "a/b"])
def test_memory_limits_of_a_group_and_above(
    tmp_path: Path, limited: str, group: str, mounts: str, name: str, text: str, expected: int
) -> None:
    folder = Path(mounts.split()[4].lstrip("/"))
    (tmp_path / folder / "a" / "b").mkdir(parents=True)
    file = (folder / limited / name).relative_to("sys/fs/cgroup")
    assert machine_bytes(group_tree(tmp_path, group, mounts, {str(file): text})) == expected
