"""Device classes: the order, detection under limits, and whether limits hold."""

from __future__ import annotations

from dataclasses import replace

import archspec.cpu
import pytest

from freezer.hardware import (
    DEVICE_CLASSES,
    DeviceClass,
    Host,
    auto_classes,
    best_level,
    describe_host,
    lesser_classes,
)
from tests.support import hosts

V3 = "cpu-x86-64-v3"
V4 = "cpu-x86-64-v4"


@pytest.mark.parametrize(
    "found",
    [found for found in DEVICE_CLASSES.values() if found.archspec],
    ids=lambda found: found.name,
)
def test_features_are_those_of_the_microarchitecture(found: DeviceClass) -> None:
    target = archspec.cpu.TARGETS[str(found.archspec)]
    unlisted = {
        "cpu-aarch64": {"fp", "asimd"},
        "cpu-sapphirerapids": {"avx512_fp16"},
    }  # architecture's own; new in archspec
    assert found.features - target.features == unlisted.get(found.name, set())
    assert found.vendor in (None, target.vendor)


@pytest.mark.parametrize(
    ("environ", "classes"),
    [
        ({}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, (V3, "portable")),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
        ({"ATEN_CPU_CAPABILITY": "default"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ("portable",)),
        ({"ONEDNN_MAX_CPU_ISA": "no such thing"}, (V4, V3, "portable")),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"}, (V3, "portable")),
    ],
)
def test_environment_limits_remove_classes(
    environ: dict[str, str], classes: tuple[str, ...]
) -> None:
    machine = describe_host(hosts.SKYLAKE_SERVER, environ)
    assert machine.classes == classes
    assert machine.hardware == V4
    for name in {V3, V4} - set(classes):
        assert machine.why_not[name].endswith("limits this process")


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        (hosts.ALDER_LAKE, {}, ("avx2", "avx2", "avx2", "avx2_vnni")),
        (hosts.SKYLAKE_SERVER, {}, ("avx512", "avx512", "avx512", "avx512")),
        (hosts.SKYLAKE_SERVER, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ("avx2", "avx2", "avx2", "avx2")),
        (
            hosts.SKYLAKE_SERVER,
            {"ATEN_CPU_CAPABILITY": "avx2"},
            ("avx512", "avx512", "avx512", "avx512"),
        ),
        (hosts.ZEN5, {}, ("avx512", "avx512_bf16", "avx512", "avx512_vnni")),
        (hosts.SAPPHIRE_RAPIDS, {}, ("avx512", "amx", "avx512_fp16", "amx")),
        (hosts.IVY_BRIDGE, {}, ("plain", "plain", "plain", "plain")),
    ],
)
def test_layouts_follow_limits_of_onednn(
    host: Host, environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    found = describe_host(host, environ).layouts
    assert tuple(found[dtype] for dtype in ("float32", "bfloat16", "float16", "int8")) == expected


def test_sve_length_must_match() -> None:
    why_not = describe_host(replace(hosts.GRAVITON3, sve_bits=512), {}).why_not
    assert why_not["cpu-neoverse-v1"] == "SVE's vectors have 512 bits, and the class's 256"


def test_auto_selects_level_gpus_and_portable() -> None:
    assert auto_classes((V4, V3, "portable")) == (V4, "portable")
    assert auto_classes(("cuda-sm90", V3, "portable")) == (V3, "cuda-sm90", "portable")
    assert auto_classes(("cuda-sm90", "cuda-sm86", V3, "portable")) == (
        V3,
        "cuda-sm90",
        "cuda-sm86",
        "portable",
    )
    assert auto_classes(("portable",)) == ("portable",)
    assert best_level(("portable",)) is None
    assert lesser_classes(("cpu-zen4", V4, V3, "cuda-sm90", "portable")) == {V3}
    assert lesser_classes((V3, "portable")) == set()
    assert auto_classes(("cpu-neoverse-v1", "cpu-aarch64", "portable")) == (
        "cpu-neoverse-v1",
        "portable",
    )
    assert auto_classes(("cpu-cascadelake", V4, V3, "portable")) == (
        V4,
        "portable",
    ), "finer classes must be named"
