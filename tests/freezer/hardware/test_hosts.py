"""The class that serves each of many described hosts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from freezer.artifact import Manifest
from freezer.hardware import DEVICE_CLASSES, Host, can_run, describe_host
from freezer.hardware.cuda import Gpu
from freezer.serving.compatibility import refusal_of, rungs
from tests.support import hosts
from tests.support.hosts import A100, AMD, H100, serving_on, x86
from tests.support.steps import manifest_of, plain_payload

V3 = "cpu-x86-64-v3"
V4 = "cpu-x86-64-v4"
TWO_GPUS = x86("zen4", AMD, gpus=(A100, H100))
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def packed(device_class: str, dtype: str) -> Manifest:
    """The manifest of an artifact of the class, with weights packed as that class packs them."""
    made = DEVICE_CLASSES[device_class]
    payload = plain_payload("exported", layouts={})
    if made.kind != "portable":
        layouts = {dtype: made.layouts[dtype]} if made.kind == "cpu" else {}
        payload = plain_payload("inductor", 2, layouts=layouts)
    return manifest_of(payload, device_class=device_class)


def taken(
    host: Host,
    environ: Mapping[str, str],
    published: tuple[str, ...] = tuple(DEVICE_CLASSES),
    dtype: str = "float32",
) -> str:
    """The class that serves: the first rung that JSON alone does not refuse."""
    process = serving_on(host, 2, environ=environ)
    for name in rungs(published, process.machine()):
        on_gpu = DEVICE_CLASSES[name].kind == "cuda"  # whose weights are not packed
        if on_gpu or refusal_of(packed(name, dtype), process) is None:
            return name
    raise AssertionError("portable always serves")


TAKEN: Mapping[str, tuple[Host, dict[str, str], str]] = {
    "AVX alone": (hosts.IVY_BRIDGE, {}, "portable"),
    "Haswell": (hosts.HASWELL, {}, V3),
    "Cascade Lake": (hosts.CASCADE_LAKE, {}, "cpu-cascadelake"),
    "AVX-512 masked": (hosts.CASCADE_LAKE_MASKED, {}, V3),
    "Cascade Lake limited to AVX2": (hosts.CASCADE_LAKE, AVX2, V3),
    "ATen limited to AVX2": (hosts.CASCADE_LAKE, {"ATEN_CPU_CAPABILITY": "avx2"}, "portable"),
    "Sapphire Rapids": (hosts.SAPPHIRE_RAPIDS, {}, "cpu-sapphirerapids"),
    "newer than archspec": (hosts.OF_TOMORROW, {}, "cpu-sapphirerapids"),
    "Zen 4 behind a hypervisor": (hosts.ZEN4_GUEST, {}, "cpu-zen4"),
    "Zen 5": (hosts.ZEN5, {}, "cpu-zen4"),
    "Neoverse N1": (hosts.GRAVITON2, {}, "cpu-aarch64"),
    "Neoverse V1": (hosts.GRAVITON3, {}, "cpu-neoverse-v1"),
    "Neoverse V2": (hosts.GRAVITON4, {}, "cpu-neoverse-v2"),
    "SVE of 512 bits": (hosts.A64FX, {}, "portable"),
    "neither x86 nor Arm": (hosts.RISCV, {}, "portable"),
    "GPU": (x86("zen4", AMD, gpus=(H100,)), {}, "cuda-sm90"),
    "GPU hidden": (x86("zen4", AMD, gpus=(H100,)), {"CUDA_VISIBLE_DEVICES": ""}, "cpu-zen4"),
    "GPU by UUID": (TWO_GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-h100"}, "cuda-sm90"),
    "unlike GPUs by number": (
        TWO_GPUS,
        {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        "cuda-sm90",
    ),
    "number of unknown order": (TWO_GPUS, {"CUDA_VISIBLE_DEVICES": "1"}, "cpu-zen4"),
    "GPU of no class": (x86("zen4", AMD, gpus=(Gpu("GPU-new", 120),)), {}, "cpu-zen4"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_host_gets_the_best_class(name: str) -> None:
    host, environ, expected = TAKEN[name]
    assert taken(host, environ) == expected


@pytest.mark.parametrize(
    ("host", "published", "dtype", "expected"),
    [
        (hosts.SAPPHIRE_RAPIDS, V4, "float32", V4),  # packed alike in all of AVX-512
        (hosts.SAPPHIRE_RAPIDS, V4, "bfloat16", "portable"),  # AMX packs it otherwise
        (hosts.CASCADE_LAKE, V4, "int8", "portable"),  # VNNI packs it otherwise
        (hosts.CASCADE_LAKE, V3, "float32", "portable"),  # AVX2's layout on AVX-512
        (hosts.ZEN5, "cpu-cascadelake", "float32", "portable"),  # Intel's classes are not AMD's
        (hosts.GRAVITON3, "cpu-aarch64", "float32", "portable"),  # NEON's layout on SVE
    ],
)
def test_lesser_classes_serve_with_equal_layouts(
    host: Host, published: str, dtype: str, expected: str
) -> None:
    assert taken(host, {}, (published, "portable"), dtype) == expected


HOSTS = [value for value in vars(hosts).values() if isinstance(value, Host)]


@pytest.mark.parametrize(
    "name", [name for name, found in DEVICE_CLASSES.items() if found.kind == "cpu" and found.limits]
)
def test_limits_make_better_cpus_pack_like_the_class(name: str) -> None:
    made = DEVICE_CLASSES[name]
    able = [host for host in HOSTS if name in describe_host(host, {}).classes]
    assert able
    for host in able:
        machine = describe_host(host, made.limits)
        assert machine.layouts == made.layouts
        assert machine.classes[0] == name
        limited = {
            other
            for other, reason in machine.why_not.items()
            if reason.endswith("limits this process")
        }
        assert not any(can_run(other, name) for other in limited)
