"""Targets that this process can build for, and thread counts."""

from __future__ import annotations

import pytest
import torch

from freezer.errors import UsageError
from freezer.freezing.target import Target, class_here, packed_layouts, target_here
from freezer.hardware import best_level, detect, device_class
from freezer.runtime.tensors import dtypes_of


@pytest.mark.skipif("cpu-x86-64-v4" not in detect().classes, reason="this process has no x86-64-v4")
def test_lower_class_needs_its_limits() -> None:
    message = (
        r"would pack weights for avx512 \(float32\), and those of cpu-x86-64-v3 are packed for avx2"
        r" \(float32\); "
        r"set ONEDNN_MAX_CPU_ISA=AVX2 .*before\s+Python starts"
    )
    with pytest.raises(UsageError, match=message):
        target_here("cpu-x86-64-v3", 1)


def test_only_the_programs_dtypes_decide_packing() -> None:
    level = best_level(detect().classes)
    if level is None or detect().layouts["int8"] == device_class(level).layouts["int8"]:
        pytest.skip("this process packs all dtypes as its level does")
    target = Target(device_class=device_class(level), num_threads=1)
    assert packed_layouts(target, ("float32", "int64", "bool")) == {
        "float32": target.device_class.layouts["float32"]
    }
    with pytest.raises(
        UsageError,
        match=(
            rf"would pack weights for \w+ \(int8\), and those of {level} are packed for \w+"
            r" \(int8\)"
        ),
    ):
        packed_layouts(target, ("float32", "quint8"))


def test_auto_selects_a_finer_class_for_low_precision() -> None:
    machine, level = detect(), best_level(detect().classes)
    if level is None:
        pytest.skip("this machine has no level")
    assert class_here(("float32", "float64", "int64")) == level
    for dtype in ("bfloat16", "float16", "int8"):
        alike = machine.layouts[dtype] == device_class(level).layouts[dtype]
        finer = (
            machine.hardware in machine.classes
            and device_class(str(machine.hardware)).layouts[dtype] == machine.layouts[dtype]
        )
        assert class_here(("float32", dtype)) == (level if alike or not finer else machine.hardware)


def test_integer_matrices_count_as_weights() -> None:
    table, count = torch.zeros(2, 3, dtype=torch.int8), torch.zeros(3, dtype=torch.uint8)
    assert dtypes_of((table, count, torch.zeros(1))) == {"int8", "float32"}
    assert dtypes_of((count,)) == set()
