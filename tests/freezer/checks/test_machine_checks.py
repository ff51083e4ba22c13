"""Findings on hosts and limits that this machine does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.checks.findings import CheckRequest
from freezer.checks.limit_checks import check_memory, clock_finding
from freezer.checks.machine_checks import classes_finding, gpu_finding
from tests.freezer.hardware.test_cgroups import GROUPS, V2, tree
from tests.support import hosts

ONE_GPU = replace(hosts.CASCADE_LAKE, gpus=(hosts.H100,), no_gpu="", driver="550.54.15")


def test_device_classes_and_their_limits() -> None:
    found = classes_finding(hosts.CASCADE_LAKE, {})
    assert (found.level, found.text.split(",")[0]) == ("ok", "cpu-cascadelake")
    assert "not cpu-cooperlake: the CPU lacks avx512_bf16" in found.text
    limited = classes_finding(
        hosts.CASCADE_LAKE, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    )
    assert (limited.level, limited.remedy) == (
        "warning",
        "unset ONEDNN_MAX_CPU_ISA ATEN_CPU_CAPABILITY",
    )
    old = classes_finding(hosts.IVY_BRIDGE, {})
    assert (old.level, "only portable artifacts serve here" in old.text) == ("warning", True)


def test_gpus_without_a_fitting_torch() -> None:
    assert gpu_finding(hosts.CASCADE_LAKE, {}, None, None).level == "ok"
    hidden = replace(
        hosts.CASCADE_LAKE,
        no_gpu="an NVIDIA driver is here, but NVML: Driver/library version mismatch",
    )
    assert gpu_finding(hidden, {}, None, None).level == "warning"
    assert gpu_finding(ONE_GPU, {}, "12.8", None).level == "ok"
    assert "built for CPUs only" in gpu_finding(ONE_GPU, {}, None, "no CUDA").text
    older = gpu_finding(ONE_GPU, {}, "13.0", "no GPU")
    assert (older.level, "needs driver 580.65.06 or later" in older.text) == ("error", True)
    assert (
        gpu_finding(ONE_GPU, {"CUDA_VISIBLE_DEVICES": ""}, "12.8", "no GPU").remedy
        == "unset CUDA_VISIBLE_DEVICES"
    )
    assert gpu_finding(ONE_GPU, {}, "12.8", "torch finds no GPU").level == "error"


@pytest.mark.parametrize(("limit", "level"), [("500000000", "warning"), ("max", "ok")])
def test_memory_of_a_container(tmp_path: Path, limit: str, level: str) -> None:
    root = tree(tmp_path, "0::/a\n", V2, {f"{GROUPS}/a/memory.max": f"{limit}\n"})
    (found,) = check_memory(CheckRequest(), root)
    assert found.level == level
    assert ("0.5 GB by its control group" in found.text) == (level == "warning")


def test_a_slow_clock_is_a_warning() -> None:
    assert clock_finding("tsc", 60.0).level == "ok"
    slow = clock_finding("hpet", 1800.0)
    assert (slow.level, slow.text.startswith("hpet; reading the clock takes 1800 ns")) == (
        "warning",
        True,
    )
