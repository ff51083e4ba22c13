"""Refusals from manifests alone, for described machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freezer.artifact import Dropped, FreezingRecord, Manifest, Payload
from freezer.errors import Refusal
from freezer.hardware import Machine, describe_host
from freezer.serving.compatibility import refuse_by_isa, refuse_by_threads, refuse_by_torch, rungs
from tests.support import hosts
from tests.support.steps import manifest_of

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
ALL = ("portable", "cuda-sm80", V3, "cuda-sm90", V4)
AVX2_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
AVX512 = describe_host(hosts.SKYLAKE_SERVER, {})
AVX512_LIMITED = describe_host(hosts.SKYLAKE_SERVER, AVX2_LIMIT)
AVX2 = describe_host(hosts.HASWELL, {})
OLD = describe_host(hosts.IVY_BRIDGE, {})
GPU = describe_host(hosts.x86("skylake_avx512", hosts.INTEL, gpus=(hosts.H100,)), {})


@pytest.mark.parametrize(
    ("machine", "published", "expected"),
    [
        (AVX512, ALL, [V4, V3, "portable"]),
        (AVX512_LIMITED, ALL, [V3, "portable"]),
        (AVX2, ALL, [V3, "portable"]),
        (OLD, ALL, ["portable"]),
        (GPU, ALL, ["cuda-sm90", V4, V3, "portable"]),
        (AVX512, (V3,), [V3]),
        (AVX2, (V4,), []),
        (AVX2, (), []),
        (AVX512, ("portable", "cpu-of-tomorrow", V4), [V4, "portable"]),
    ],
)
def test_rungs_are_most_specific_first(
    machine: Machine, published: tuple[str, ...], expected: list[str]
) -> None:
    assert rungs(published, machine) == expected


def made(device_class: str, *threads: int | None) -> Manifest:
    payloads = tuple(
        Payload(
            path=f"payloads/{i}",
            digest=f"sha256:{'0' * 64}",
            size_bytes=1,
            kind="inductor",
            num_threads=count,
        )
        for i, count in enumerate(threads)
    )
    return manifest_of(payloads[0], payloads=payloads, device_class=device_class)


@pytest.mark.parametrize(
    ("device_class", "threads", "machine", "refused"),
    [
        (V3, 2, AVX512, True),
        (V3, 2, AVX512_LIMITED, False),
        (V3, 2, AVX2, False),
        (V4, 2, AVX512, False),
        (V3, None, AVX512, False),
        ("portable", None, AVX512, False),
    ],
)
def test_weights_packed_for_a_lesser_class_are_refused(
    device_class: str, threads: int | None, machine: Machine, refused: bool
) -> None:
    found = refuse_by_isa(made(device_class, threads), machine)
    assert (found is not None) is refused
    if found:
        assert found.reason == "isa_mismatch"
        assert found.got == "oneDNN packing for avx512 (float32) here"
        assert found.expected.startswith(
            "weights packed for avx2 (float32) (ONEDNN_MAX_CPU_ISA=AVX2 "
        )
        assert found.expected.endswith(
            " before torch's first operation; load(..., limit_isa=True) sets it)"
        )


@pytest.mark.parametrize(
    ("threads", "here", "expected"),
    [
        ((2,), 2, None),
        ((1, 4), 4, None),
        ((1, 4), 2, None),
        ((4, 3), 2, "3 or 4 (load(..., threads=N), or freeze it for `threads: [4, 3, 2]`)"),
        ((None,), 7, None),
        (
            (4, None),
            2,
            "4 (load(..., threads=N), or freeze it for `threads: [4, 2]`)",
        ),  # the other may not be for all sizes
    ],
)
def test_payloads_for_more_threads_are_refused(
    threads: tuple[int | None, ...], here: int, expected: str | None
) -> None:
    refusal = (
        Refusal(rung=V4, reason="threads_mismatch", got="2 threads", expected=expected)
        if expected
        else None
    )
    assert refuse_by_threads(made(V4, *threads), here) == refusal


def test_refusal_names_a_dropped_payload() -> None:
    dropped = (
        Dropped(
            payload="payloads/all-threads1.pt2",
            num_threads=1,
            reason="at best 0.98 times as fast as eager",
        ),
    )
    found = refuse_by_threads(replace(made(V4, 2), freezing=FreezingRecord(dropped=dropped)), 1)
    assert found is not None
    assert (
        found.got == "1 thread (the payload for 1 was dropped: at best 0.98 times as fast as eager)"
    )
    assert found.expected == "2 (load(..., threads=N))"


@pytest.mark.parametrize(
    ("here", "refused"),
    [
        ("2.10.1", True),
        ("1.13", True),
        ("2.11.0+cpu", False),
        ("2.13.0a0+git1", False),
        ("3.0", False),
    ],
)
def test_an_older_torch_is_refused(here: str, refused: bool) -> None:
    manifest = made(V4, 2)
    assert manifest.needs.torch == "2.11"
    found = refuse_by_torch(manifest, here)
    assert (found is not None) is refused
    if found:
        assert str(found) == f"{V4}: torch_too_old: got torch {here}, expected torch >= 2.11"


def test_compiled_code_needs_a_canary_with_newer_torch() -> None:
    compiled = made(V4, 2)
    assert refuse_by_torch(compiled, "2.12.0") is None
    found = refuse_by_torch(compiled, "2.12.0", canary=False)
    assert (
        str(found)
        == f"{V4}: torch_untried: got torch 2.12.0, and no canary, expected torch 2.11, or"
        " load(..., canary=True)"
    )
    assert refuse_by_torch(compiled, "2.11.3", canary=False) is None
    scripted = manifest_of(replace(compiled.payloads[0], kind="torchscript"), device_class=V4)
    assert refuse_by_torch(scripted, "2.12.0", canary=False) is None
