"""What artifacts for GPUs need, and why they are refused: from JSON alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freezer.artifact import Manifest, Needs, PayloadKind
from freezer.hardware import DEVICE_CLASSES, CudaHere, Machine, cuda_needs, describe_host
from freezer.hardware.cuda import Gpu
from freezer.serving.compatibility import refusal_of, unserved_gpus
from tests.support.hosts import A100, H100, HASWELL, INTEL, serving_on, x86
from tests.support.steps import manifest_of, plain_payload

SM90 = DEVICE_CLASSES["cuda-sm90"]
HERE = CudaHere(devices=(("cuda:0", 90), ("cuda:1", 80)), runtime="12.8", driver="550.54.15")


def manifest(kind: PayloadKind = "inductor", **changes: Any) -> Manifest:
    needs = Needs(torch="2.11", cuda=cuda_needs(SM90, "12.8"))
    return manifest_of(plain_payload(kind), device_class="cuda-sm90", **{"needs": needs, **changes})


@pytest.mark.parametrize(
    ("here", "reason", "got"),
    [
        (HERE, None, ""),
        (replace(HERE, runtime="13.0", driver="580.65.06"), None, ""),
        (replace(HERE, driver=None), None, ""),
        (
            CudaHere(why_not="torch 2.13.0 is built without CUDA"),
            "no_cuda",
            "torch 2.13.0 is built without CUDA",
        ),
        (replace(HERE, devices=(("cuda:1", 80),)), "capability_mismatch", "cuda:1 of 8.0"),
        (replace(HERE, devices=(("cuda:0", 100),)), "capability_mismatch", "cuda:0 of 10.0"),
        (replace(HERE, runtime="11.8"), "cuda_too_old", "a torch for CUDA 11.8"),
        (replace(HERE, driver="470.82.01"), "driver_too_old", "driver 470.82.01"),
    ],
)
def test_refusals_have_reasons(here: CudaHere, reason: str | None, got: str) -> None:
    found = refusal_of(manifest(), serving_on(HASWELL, cuda=here))
    assert (found.reason if found else None) == reason
    assert found is None or (found.rung == "cuda-sm90" and got in found.got), found


def test_kernels_of_torch_need_no_newer_cuda() -> None:
    older = serving_on(HASWELL, cuda=replace(HERE, runtime="12.6"))
    assert refusal_of(manifest("torchscript"), older) is None
    assert refusal_of(manifest("exported"), older) is None
    portable = manifest_of(manifest().payloads[0])
    assert refusal_of(portable, serving_on(HASWELL)) is None, "a portable one needs no GPU"


def test_published_gpu_classes_that_do_not_serve() -> None:
    published = ("cpu-x86-64-v3", "cuda-sm80", "cuda-sm90", "cuda-sm999", "portable")

    def machine(cpu: str, *gpus: Gpu) -> Machine:
        return describe_host(x86(cpu, INTEL, gpus=gpus), {})

    (found,) = unserved_gpus(published, machine("haswell", A100))
    assert str(found) == "cuda-sm90: capability_mismatch: got cuda-sm80, expected cuda-sm90"
    (found,) = unserved_gpus(["cuda-sm90"], machine("ivybridge", H100))
    assert (found.reason, found.expected) == ("host_mismatch", "a CPU of cpu-x86-64-v3")
    assert unserved_gpus(published, machine("haswell")) == [], "without a GPU they are nothing"
    assert unserved_gpus(published, machine("haswell", A100, H100)) == []
