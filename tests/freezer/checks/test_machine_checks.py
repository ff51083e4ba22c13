"""Findings on hosts and limits that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.checks import CheckRequest
from freezer.checks.machine_checks import check_memory, classes_finding
from freezer.hardware import Host
from tests.support import hosts
from tests.support.control_groups import V2, group_tree


@pytest.mark.parametrize(
    ("host", "environ", "level", "remedy"),
    [
        (hosts.CASCADE_LAKE, {}, "ok", ""),
        (hosts.CASCADE_LAKE, {"ATEN_CPU_CAPABILITY": "avx2"}, "warning", "unset ATEN_CPU"),
        (hosts.CASCADE_LAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "warning", "unset ONEDNN_MAX"),
        (hosts.IVY_BRIDGE, {}, "warning", "lscpu"),
    ],
)
def test_device_classes_and_their_limits(
    host: Host, environ: dict[str, str], level: str, remedy: str
) -> None:
    finding = classes_finding(host, environ)
    assert (finding.level, finding.remedy.startswith(remedy)) == (level, True)


@pytest.mark.parametrize(("limit", "level"), [("500000000", "warning"), ("max", "ok")])
def test_memory_of_a_container(tmp_path: Path, limit: str, level: str) -> None:
    root = group_tree(tmp_path, "0::/a\n", V2, {"a/memory.max": f"{limit}\n"})
    (finding,) = check_memory(CheckRequest(), root)
    assert finding.level == level
    assert finding.text.startswith("0.5 GB") == (level == "warning")
