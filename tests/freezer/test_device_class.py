"""Device classes: the order, detection under limits, and whether limits hold."""

from __future__ import annotations

from itertools import product

import archspec.cpu
import pytest

from freezer.device_class import (
    DEVICE_CLASSES,
    Machine,
    auto_classes,
    available_threads,
    best_level,
    can_run,
    detect,
    device_class,
    limits_hold,
)
from freezer.errors import UsageError

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
ON_V4 = Machine(classes=(V4, V3, "portable"), hardware=V4, why_not={})
ON_V3 = Machine(classes=(V3, "portable"), hardware=V3, why_not={})

needs_v4 = pytest.mark.skipif(detect({}).hardware != V4, reason="this machine is no x86-64-v4")


def test_can_run_is_a_partial_order() -> None:
    names = list(DEVICE_CLASSES)
    for a in names:
        assert can_run(a, a)
    for a, b in product(names, names):
        assert a == b or not (can_run(a, b) and can_run(b, a)), (a, b)
    for a, b, c in product(names, names, names):
        assert can_run(a, c) or not (can_run(a, b) and can_run(b, c)), (a, b, c)


def test_what_runs_where() -> None:
    assert can_run(V3, V4)
    assert not can_run(V4, V3)
    assert all(can_run("portable", name) for name in DEVICE_CLASSES)
    assert not can_run(V3, "portable")
    assert not can_run("cuda-sm80", "cuda-sm90"), "a CUDA class runs on exactly its capability"
    assert not can_run("cuda-sm80", V4)
    assert not can_run(V3, "cuda-sm80")


def test_an_unknown_class_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="unknown device class 'cpu-z80'; expected one of portable, cpu-x86-64-v3"):
        device_class("cpu-z80")


def test_every_cpu_class_says_how_to_build_for_it() -> None:
    for found in DEVICE_CLASSES.values():
        if found.kind == "cpu":
            assert found.archspec in archspec.cpu.TARGETS
            assert found.march
            assert found.simdlen
            assert found.limits["ONEDNN_MAX_CPU_ISA"]


def test_this_machine_runs_portable_last() -> None:
    machine = detect()
    assert machine.classes[-1] == "portable"
    assert all(can_run(name, machine.classes[0]) for name in machine.classes)
    assert set(machine.classes) | set(machine.why_not) >= {V3, V4}


@needs_v4
@pytest.mark.parametrize(
    ("environ", "classes"),
    [
        ({}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, (V3, "portable")),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, (V4, V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "default"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
    ],
)
def test_limits_in_the_environment_cut_the_classes(environ: dict[str, str], classes: tuple[str, ...]) -> None:
    machine = detect(environ)
    assert tuple(name for name in machine.classes if not name.startswith("cuda")) == classes
    assert machine.hardware == V4
    for name in {V3, V4} - set(classes):
        assert "limits this process" in machine.why_not[name]


@pytest.mark.parametrize("name", [V3, V4])
def test_a_classs_own_limits_leave_that_class_the_best(name: str) -> None:
    if name not in detect({}).classes:
        pytest.skip(f"this machine is no {name}")
    limits = device_class(name).limits
    machine = detect(limits)
    assert best_level(machine.classes) == name
    assert limits_hold(name, machine, limits)


@pytest.mark.parametrize(
    ("name", "machine", "environ", "holds"),
    [
        (V4, ON_V4, {}, True),
        (V3, ON_V4, {}, False),
        (V3, ON_V4, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, True),
        (V3, ON_V4, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
        (V3, ON_V4, {"ATEN_CPU_CAPABILITY": "avx2"}, False),
        (V3, ON_V3, {}, True),
        ("portable", ON_V4, {}, True),
    ],
)
def test_limits_hold_when_onednn_is_held_to_the_class(name: str, machine: Machine, environ: dict[str, str], holds: bool) -> None:
    assert limits_hold(name, machine, environ) is holds


def test_auto_is_the_level_and_portable() -> None:
    assert auto_classes((V4, V3, "portable")) == (V4, "portable")
    assert auto_classes(("cuda-sm90", V3, "portable")) == (V3, "portable"), "no lowering builds for a GPU yet"
    assert auto_classes(("portable",)) == ("portable",)
    assert best_level(("portable",)) is None


def test_threads_are_counted_by_affinity() -> None:
    assert available_threads() >= 1
