"""Device classes: the order, detection under limits, and whether limits hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import archspec.cpu
import pytest

from freezer.errors import UsageError
from freezer.hardware.device_classes import DEVICE_CLASSES, DeviceClass, auto_classes, best_level, can_run, device_class
from freezer.hardware.host import Host
from freezer.hardware.machine import available_threads, describe_host, detect
from tests.freezer import hosts

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"


def test_can_run_is_a_partial_order() -> None:
    names = list(DEVICE_CLASSES)
    for a in names:
        assert can_run(a, a)
    for a, b in product(names, names):
        assert a == b or not (can_run(a, b) and can_run(b, a)), (a, b)
    for a, b, c in product(names, names, names):
        assert can_run(a, c) or not (can_run(a, b) and can_run(b, c)), (a, b, c)


def test_the_order_is_archspec_s_where_it_has_one() -> None:
    known = {name: found.archspec for name, found in DEVICE_CLASSES.items() if found.archspec}
    assert set(DEVICE_CLASSES) - set(known) == {
        "portable",
        "cpu-cooperlake",
        *(name for name in DEVICE_CLASSES if name.startswith("cuda-")),
    }
    for a, b in product(known, known):
        assert can_run(a, b) == (archspec.cpu.TARGETS[known[a]] <= archspec.cpu.TARGETS[known[b]]), (a, b)


@pytest.mark.parametrize("found", [found for found in DEVICE_CLASSES.values() if found.archspec], ids=lambda found: found.name)
def test_a_class_asks_for_nothing_that_its_microarchitecture_lacks(found: DeviceClass) -> None:
    target = archspec.cpu.TARGETS[str(found.archspec)]
    unlisted = {"cpu-aarch64": {"fp", "asimd"}, "cpu-sapphirerapids": {"avx512_fp16"}}  # architecture's own; new in archspec
    assert found.features - target.features == unlisted.get(found.name, set())
    assert found.vendor in (None, target.vendor)


def test_a_better_class_has_all_that_a_lesser_one_has() -> None:
    for lesser, better in product(DEVICE_CLASSES.values(), DEVICE_CLASSES.values()):
        if can_run(lesser.name, better.name) and lesser.kind == better.kind == "cpu":
            assert lesser.features <= better.features


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
            assert found.base in archspec.cpu.TARGETS
            assert found.march
            assert found.simdlen
            assert bool(found.limits) == (found.machine == "x86_64"), "oneDNN has limits on x86-64 alone"
        elif found.kind == "cuda":
            assert device_class(str(found.host)).kind == "cpu"


def test_this_machine_runs_portable_last() -> None:
    machine = detect()
    assert machine.classes[-1] == "portable"
    assert all(can_run(name, machine.classes[0]) for name in machine.classes)
    assert set(machine.classes) | set(machine.why_not) >= {V3, V4}


@pytest.mark.parametrize(
    ("environ", "classes"),
    [
        ({}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, (V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, (V3, "portable")),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, (V4, V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "default"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "no such thing"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
    ],
)
def test_limits_in_the_environment_cut_the_classes(environ: dict[str, str], classes: tuple[str, ...]) -> None:
    machine = describe_host(hosts.SKYLAKE_SERVER, environ)
    assert machine.classes == classes
    assert machine.hardware == V4
    for name in {V3, V4} - set(classes):
        assert machine.why_not[name].endswith("limits this process")


@pytest.mark.parametrize("name", [V3, V4])
def test_a_classs_own_limits_leave_that_class_the_best(name: str) -> None:
    if name not in detect({}).classes:
        pytest.skip(f"this machine is no {name}")
    machine = detect(device_class(name).limits)
    assert best_level(machine.classes) == name
    assert machine.layouts == device_class(name).layouts


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        (hosts.HASWELL, {}, ("avx2", "avx2", "avx2", "avx2")),
        (hosts.ALDER_LAKE, {}, ("avx2", "avx2", "avx2", "avx2_vnni")),
        (hosts.SKYLAKE_SERVER, {}, ("avx512", "avx512", "avx512", "avx512")),
        (hosts.SKYLAKE_SERVER, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ("avx2", "avx2", "avx2", "avx2")),
        (hosts.SKYLAKE_SERVER, {"ATEN_CPU_CAPABILITY": "avx2"}, ("avx512", "avx512", "avx512", "avx512")),
        (hosts.CASCADE_LAKE, {}, ("avx512", "avx512", "avx512", "avx512_vnni")),
        (hosts.ZEN5, {}, ("avx512", "avx512_bf16", "avx512", "avx512_vnni")),
        (hosts.ZEN5, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, ("avx2", "avx2", "avx2", "avx2_vnni")),
        (hosts.SAPPHIRE_RAPIDS, {}, ("avx512", "amx", "avx512_fp16", "amx")),
        (hosts.SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}, ("avx512", "avx512_bf16", "avx512_fp16", "avx512_vnni")),
        (hosts.OF_TOMORROW, {"ONEDNN_MAX_CPU_ISA": "AVX10_2_512_AMX_2"}, ("avx512", "amx", "amx", "amx")),
        (hosts.IVY_BRIDGE, {}, ("plain", "plain", "plain", "plain")),
        (hosts.RISCV, {}, ("plain", "plain", "plain", "plain")),
    ],
)
def test_layouts_follow_what_onednn_may_use(host: Host, environ: dict[str, str], expected: tuple[str, ...]) -> None:
    found = describe_host(host, environ).layouts
    assert tuple(found[dtype] for dtype in ("float32", "bfloat16", "float16", "int8")) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (hosts.HASWELL, {V4: "the CPU lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl", "cuda": "no NVIDIA driver"}),
        (
            hosts.CASCADE_LAKE_GUEST,
            {
                "cpu-cascadelake": "the CPU lacks avx512_vnni",
                "cpu-zen4": "the CPU is of GenuineIntel, and the class is of AuthenticAMD",
                "cuda": "no NVIDIA driver",
            },
        ),
        (
            hosts.A64FX,
            {"cpu-neoverse-v1": "the CPU lacks asimddp, asimdfhm, bf16, flagm, i8mm, ilrcpc, jscvt, lrcpc, svebf16, svei8mm"},
        ),
    ],
)
def test_of_the_classes_out_of_reach_the_next_are_told(host: Host, expected: dict[str, str]) -> None:
    told = describe_host(host, {}).next_better
    assert {name: told[name] for name in expected} == expected
    assert set(told) <= {*expected, "cuda", "cpu-neoverse-v2"}


def test_a_length_of_vectors_is_held_to() -> None:
    why_not = describe_host(replace(hosts.GRAVITON3, sve_bits=512), {}).why_not
    assert why_not["cpu-neoverse-v1"] == "SVE's vectors have 512 bits, and the class's 256"


def test_auto_is_the_level_and_portable() -> None:
    assert auto_classes((V4, V3, "portable")) == (V4, "portable")
    assert auto_classes(("cuda-sm90", V3, "portable")) == (V3, "cuda-sm90", "portable"), "the CPU's, and the GPU's besides"
    assert auto_classes(("cuda-sm90", "cuda-sm86", V3, "portable")) == (V3, "cuda-sm90", "cuda-sm86", "portable")
    assert auto_classes(("portable",)) == ("portable",)
    assert best_level(("portable",)) is None
    assert auto_classes(("cpu-neoverse-v1", "cpu-aarch64", "portable")) == ("cpu-neoverse-v1", "portable")
    assert auto_classes(("cpu-cascadelake", V4, V3, "portable")) == (V4, "portable"), "finer ones are used where they are named"


def test_threads_are_counted_by_affinity() -> None:
    assert available_threads() >= 1
