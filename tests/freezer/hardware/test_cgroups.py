"""CPU quotas and memory limits, from files and from a real control group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from freezer.hardware import available_cpus, cpu_quota, machine_bytes, thread_budget

AFFINITY = len(os.sched_getaffinity(0))
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 30 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "36 30 0:32 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n"
DOCKER = "733 722 0:26 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"


def tree(root: Path, own: str, mounts: str, files: dict[str, str]) -> Path:
    """A root folder with the groups of this process, mounts and files."""
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("own", "mounts", "files", "quota"),
    [
        pytest.param("0::/\n", V2, {}, None, id="v2-no-file"),
        pytest.param("0::/a\n", V2, {f"{GROUPS}/a/cpu.max": "max 100000\n"}, None, id="v2-max"),
        pytest.param("0::/a\n", V2, {f"{GROUPS}/a/cpu.max": "150000 100000\n"}, 1.5, id="v2"),
        pytest.param(
            "0::/a/b\n",
            V2,
            {f"{GROUPS}/a/cpu.max": "200000 100000\n", f"{GROUPS}/a/b/cpu.max": "max 100000\n"},
            2.0,
            id="v2-above",
        ),
        pytest.param(
            "0::/docker/abc\n",
            DOCKER,
            {f"{GROUPS}/cpu.max": "50000 100000\n"},
            0.5,
            id="v2-mounted-from-below",
        ),
        pytest.param(
            "0::/host/name\n",
            V2,
            {f"{GROUPS}/cpu.max": "300000 100000\n"},
            3.0,
            id="v2-of-another-namespace",
        ),
        pytest.param(
            "4:memory:/m\n3:cpu,cpuacct:/x\n",
            MEMORY + V1,
            {
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            4.0,
            id="v1",
        ),
        pytest.param(
            "3:cpu,cpuacct:/x\n",
            V1,
            {
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_quota_us": "-1\n",
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            None,
            id="v1-none",
        ),
        pytest.param(
            "0::/a\n", V2, {f"{GROUPS}/a/cpu.max": "many 100000\n"}, None, id="unreadable"
        ),
    ],
)
def test_the_smallest_quota_counts(
    tmp_path: Path, own: str, mounts: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(tree(tmp_path, own, mounts, files)) == quota


def test_no_control_groups_means_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert available_cpus(tmp_path) == AFFINITY


@pytest.mark.parametrize(
    ("quota", "expected"), [("50000", 1), ("100000", 1), ("150000", 1), ("9900000", AFFINITY)]
)
def test_quotas_are_rounded_down_to_at_least_one(tmp_path: Path, quota: str, expected: int) -> None:
    root = tree(tmp_path, "0::/a\n", V2, {f"{GROUPS}/a/cpu.max": f"{quota} 100000\n"})
    assert available_cpus(root) == expected


def test_the_thread_budget_is_limited_by_cpus(tmp_path: Path) -> None:
    assert thread_budget(1, tmp_path) == 1
    assert thread_budget(AFFINITY + 7, tmp_path) == AFFINITY
    one = tree(tmp_path, "0::/a\n", V2, {f"{GROUPS}/a/cpu.max": "100000 100000\n"})
    assert thread_budget(AFFINITY + 7, one) == 1


def test_a_real_quota_is_detected(limited_group: Path) -> None:
    code = (
        "import os, sys\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from freezer.hardware.cgroups import available_cpus, cpu_quota\n"
        "print(cpu_quota(), available_cpus())\n"
    )
    command = [sys.executable, "-c", code, str(limited_group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1.0", "1"]


PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("own", "mount", "name", "text", "expected"),
    [
        ("0::/a/b\n", V2, "memory.max", "1000000\n", 1_000_000),
        ("0::/a/b\n", V2, "memory.max", "max\n", PHYSICAL),
        ("4:memory:/a/b\n", MEMORY, "memory.limit_in_bytes", "2000000\n", 2_000_000),
        ("4:memory:/a/b\n", MEMORY, "memory.limit_in_bytes", "9223372036854771712\n", PHYSICAL),
        ("4:cpu:/a/b\n", V1, "memory.limit_in_bytes", "2000000\n", PHYSICAL),
    ],
)
@pytest.mark.parametrize("group", ["a", "a/b"])
def test_memory_limits_of_a_group_and_above(
    tmp_path: Path, group: str, own: str, mount: str, name: str, text: str, expected: int
) -> None:
    folder = Path(mount.split()[4].lstrip("/"))
    (tmp_path / folder / "a" / "b").mkdir(parents=True)
    assert machine_bytes(tree(tmp_path, own, mount, {f"{folder}/{group}/{name}": text})) == expected
