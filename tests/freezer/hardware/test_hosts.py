"""The class that serves each of many described hosts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

from freezer.artifact import Manifest, Payload
from freezer.hardware import DEVICE_CLASSES, Host, can_run, describe_host, machine, this_host
from freezer.hardware.cuda import Gpu
from freezer.hardware.machine import is_emulated
from freezer.serving.compatibility import refusal_of, rungs
from tests.support import hosts
from tests.support.hosts import A100, AMD, H100, serving_on, x86
from tests.support.steps import manifest_of

V3 = "cpu-x86-64-v3"
V4 = "cpu-x86-64-v4"
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def packed(device_class: str, dtype: str) -> Manifest:
    """The manifest of an artifact of the class, with weights packed as that class packs them."""
    made = DEVICE_CLASSES[device_class]
    payload = Payload(
        path="payloads/all.pt2",
        digest=f"sha256:{'0' * 64}",
        size_bytes=1,
        kind="exported" if made.kind == "portable" else "inductor",
        num_threads=None if made.kind == "portable" else 2,
        layouts={dtype: made.layouts[dtype]} if made.kind == "cpu" else {},
    )
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


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        pytest.param(hosts.IVY_BRIDGE, {}, "portable", id="AVX alone"),
        pytest.param(hosts.HASWELL, {}, V3, id="Haswell"),
        pytest.param(hosts.SKYLAKE_SERVER, {}, V4, id="Skylake server"),
        pytest.param(hosts.CASCADE_LAKE, {}, "cpu-cascadelake", id="Cascade Lake"),
        pytest.param(hosts.CASCADE_LAKE_MASKED, {}, V3, id="AVX-512 masked"),
        pytest.param(hosts.CASCADE_LAKE, AVX2, V3, id="Cascade Lake limited to AVX2"),
        pytest.param(
            hosts.CASCADE_LAKE,
            {"ATEN_CPU_CAPABILITY": "avx2"},
            "portable",
            id="ATen limited to AVX2",
        ),
        pytest.param(hosts.SAPPHIRE_RAPIDS, {}, "cpu-sapphirerapids", id="Sapphire Rapids"),
        pytest.param(hosts.OF_TOMORROW, {}, "cpu-sapphirerapids", id="newer than archspec"),
        pytest.param(hosts.ZEN4_GUEST, {}, "cpu-zen4", id="Zen 4 behind a hypervisor"),
        pytest.param(hosts.ZEN5, {}, "cpu-zen4", id="Zen 5"),
        pytest.param(hosts.GRAVITON2, {}, "cpu-aarch64", id="Neoverse N1"),
        pytest.param(hosts.GRAVITON3, {}, "cpu-neoverse-v1", id="Neoverse V1"),
        pytest.param(hosts.GRAVITON4, {}, "cpu-neoverse-v2", id="Neoverse V2"),
        pytest.param(hosts.A64FX, {}, "portable", id="SVE of 512 bits"),
        pytest.param(hosts.RISCV, {}, "portable", id="neither x86 nor Arm"),
        pytest.param(x86("zen4", AMD, gpus=(H100,)), {}, "cuda-sm90", id="GPU"),
        pytest.param(
            x86("zen4", AMD, gpus=(H100,)),
            {"CUDA_VISIBLE_DEVICES": ""},
            "cpu-zen4",
            id="GPU hidden",
        ),
        pytest.param(
            x86("zen4", AMD, gpus=(A100, H100)),
            {"CUDA_VISIBLE_DEVICES": "GPU-h100"},
            "cuda-sm90",
            id="GPU by UUID",
        ),
        pytest.param(
            x86("zen4", AMD, gpus=(A100, H100)),
            {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            "cuda-sm90",
            id="unlike GPUs by number",
        ),
        pytest.param(
            x86("zen4", AMD, gpus=(A100, H100)),
            {"CUDA_VISIBLE_DEVICES": "1"},
            "cpu-zen4",
            id="number of unknown order",
        ),
        pytest.param(
            x86("zen4", AMD, gpus=(Gpu("GPU-new", 120),)), {}, "cpu-zen4", id="GPU of no class"
        ),
    ],
)
def test_each_host_gets_the_best_class(host: Host, environ: dict[str, str], expected: str) -> None:
    assert taken(host, environ) == expected


@pytest.mark.parametrize(
    ("host", "published", "dtype", "expected"),
    [
        pytest.param(
            hosts.SAPPHIRE_RAPIDS,
            (V4, "portable"),
            "float32",
            V4,
            id="float32 is packed alike in all of AVX-512",
        ),
        pytest.param(
            hosts.SAPPHIRE_RAPIDS,
            (V4, "portable"),
            "bfloat16",
            "portable",
            id="AMX packs bfloat16 otherwise",
        ),
        pytest.param(
            hosts.CASCADE_LAKE, (V4, "portable"), "int8", "portable", id="VNNI packs int8 otherwise"
        ),
        pytest.param(
            hosts.CASCADE_LAKE,
            (V3, "portable"),
            "float32",
            "portable",
            id="AVX2's layout on AVX-512",
        ),
        pytest.param(
            hosts.ZEN5,
            ("cpu-cascadelake", "portable"),
            "float32",
            "portable",
            id="Intel's classes are not AMD's",
        ),
        pytest.param(
            hosts.GRAVITON3,
            ("cpu-aarch64", "portable"),
            "float32",
            "portable",
            id="NEON's layout on SVE",
        ),
    ],
)
def test_lesser_classes_serve_with_equal_layouts(
    host: Host, published: tuple[str, ...], dtype: str, expected: str
) -> None:
    assert taken(host, {}, published, dtype) == expected


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


def test_an_emulator_is_the_executable_of_threads(tmp_path: Path) -> None:
    for name, program in (("self", "/usr/bin/python3"), ("thread-self", "/usr/bin/qemu-x86_64")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "exe").symlink_to(program)
    assert is_emulated(tmp_path)
    assert not is_emulated(tmp_path / "no-proc")
    assert not is_emulated()


def test_emulated_arm_features_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of qemu's neoverse-n1; /proc/cpuinfo shows the x86 host."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(machine, "_auxiliary", {16: 0x119FFB, 26: 0}.__getitem__)
    this_host.cache_clear()
    try:
        assert describe_host(this_host(), {}).classes == ("cpu-aarch64", "portable")
    finally:
        this_host.cache_clear()
