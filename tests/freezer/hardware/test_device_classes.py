"""Device classes: the order, detection under limits, and whether limits hold."""

from __future__ import annotations

import archspec.cpu
import pytest

from freezer.hardware import (
    DEVICE_CLASSES,
    DeviceClass,
    auto_classes,
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
    ("detected", "selected"),
    [
        ((V4, V3, "portable"), (V4, "portable")),
        (("cuda-sm90", "cuda-sm86", V3, "portable"), (V3, "cuda-sm90", "cuda-sm86", "portable")),
        (("portable",), ("portable",)),
        (("cpu-neoverse-v1", "cpu-aarch64", "portable"), ("cpu-neoverse-v1", "portable")),
        (("cpu-cascadelake", V4, V3, "portable"), (V4, "portable")),  # finer ones must be named
    ],
)
def test_auto_selects_level_gpus_and_portable(
    detected: tuple[str, ...], selected: tuple[str, ...]
) -> None:
    assert auto_classes(detected) == selected


def test_lesser_classes_are_those_below_the_level() -> None:
    assert lesser_classes(("cpu-zen4", V4, V3, "cuda-sm90", "portable")) == {V3}
    assert lesser_classes((V3, "portable")) == set()
