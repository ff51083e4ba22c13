"""Refusals from manifests alone, for described machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freezer.artifact import Manifest, PayloadKind
from freezer.hardware import Machine, describe_host
from freezer.serving.compatibility import refusal_of, rungs
from freezer.serving.process import LoadOptions
from tests.support import hosts
from tests.support.hosts import serving_on
from tests.support.steps import manifest_of, plain_payload

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
ALL = ("portable", "cuda-sm80", V3, "cuda-sm90", V4)
AVX2_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
AVX512 = describe_host(hosts.SKYLAKE_SERVER, {})
AVX512_LIMITED = describe_host(hosts.SKYLAKE_SERVER, AVX2_LIMIT)
GPU = describe_host(hosts.x86("skylake_avx512", hosts.INTEL, gpus=(hosts.H100,)), {})


@pytest.mark.parametrize(
    ("machine", "published", "expected"),
    [
        (AVX512, ALL, [V4, V3, "portable"]),
        (AVX512_LIMITED, ALL, [V3, "portable"]),
        (GPU, ALL, ["cuda-sm90", V4, V3, "portable"]),
        (AVX512, ("portable", "cpu-of-tomorrow", V4), [V4, "portable"]),
    ],
)
def test_rungs_are_most_specific_first(
    machine: Machine, published: tuple[str, ...], expected: list[str]
) -> None:
    assert rungs(published, machine) == expected


def made(device_class: str, *threads: int | None) -> Manifest:
    payloads = tuple(
        plain_payload("inductor", count, path=f"payloads/{i}") for i, count in enumerate(threads)
    )
    return manifest_of(payloads[0], payloads=payloads, device_class=device_class)


def test_weights_packed_for_a_lesser_class_are_refused() -> None:
    process = serving_on(hosts.SKYLAKE_SERVER, 2)
    refusal = refusal_of(made(V3, 2), process)
    assert refusal is not None
    assert refusal.reason == "isa_mismatch"
    assert refusal.got == "oneDNN packing for avx512 (float32) here"
    assert refusal_of(made(V3, 2), serving_on(hosts.SKYLAKE_SERVER, 2, environ=AVX2_LIMIT)) is None
    assert refusal_of(made(V3, 2), replace(process, options=LoadOptions(limit_isa=True))) is None
    assert refusal_of(made(V3, None), process) is None


@pytest.mark.parametrize(
    ("threads", "here", "served"),
    [
        ((2,), 2, True),
        ((1, 4), 4, True),
        ((1, 4), 2, True),
        ((4, 3), 2, False),
        ((None,), 7, True),
        ((4, None), 2, False),  # the other may not be for all sizes
    ],
)
def test_payloads_for_more_threads_are_refused(
    threads: tuple[int | None, ...], here: int, served: bool
) -> None:
    refusal = refusal_of(made(V4, *threads), serving_on(hosts.SKYLAKE_SERVER, here))
    assert (refusal.reason if refusal else None) == (None if served else "threads_mismatch")


@pytest.mark.parametrize(
    ("kind", "torch_version", "canary", "reason"),
    [
        ("inductor", "2.10.1", True, "torch_too_old"),
        ("inductor", "2.13.0a0+git1", True, None),
        ("inductor", "3.0", True, None),
        ("inductor", "2.11.3", False, None),
        ("inductor", "2.12.0", False, "torch_untried"),
        ("torchscript", "2.12.0", False, None),
    ],
)
def test_torch_is_not_older_and_newer_needs_a_canary(
    kind: PayloadKind, torch_version: str, canary: bool, reason: str | None
) -> None:
    made_with = made(V4, 2)
    assert made_with.needs.torch == "2.11"
    payloads = (replace(made_with.payloads[0], kind=kind),)
    process = serving_on(
        hosts.SKYLAKE_SERVER, 2, torch_version=torch_version, options=LoadOptions(canary=canary)
    )
    refusal = refusal_of(replace(made_with, payloads=payloads), process)
    assert (refusal.reason if refusal else None) == reason
