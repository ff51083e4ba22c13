"""Choice of a GPU for builds and loads. Needs no GPU: torch's answers are replaced."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from freezer.errors import UsageError
from freezer.freezing.target import resolve_device, target_here
from freezer.hardware import DEVICE_CLASSES, describe_host
from freezer.runtime import devices
from freezer.runtime.devices import CPU, class_of, cuda_here, device_of, visible, with_index
from tests.support.hosts import H100, HASWELL, INTEL, x86
from tests.support.models import mlp
from tests.support.steps import HERE

SM90 = DEVICE_CLASSES["cuda-sm90"]
HOST = describe_host(x86("haswell", INTEL, gpus=(H100,)), {})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees an sm80 and two sm90; the last is the current one."""
    capabilities = [(8, 0), (9, 0), (9, 0)]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


def test_a_torch_without_cuda_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        UsageError,
        match=r"cannot build for cuda-sm90: torch .* is built without CUDA; install a build",
    ) as caught:
        target_here("cuda-sm90", 1)
    assert caught.value.code == "CP-DEVICE-CLASS"
    assert visible() == []
    here = cuda_here(None)
    assert (here.devices, "is built without CUDA" in here.why_not) == ((), True)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("cuda-sm90", None, 2),
        ("cuda-sm90", "cuda", 2),
        ("cuda-sm90", "cuda:1", 1),
        ("cuda-sm80", None, 0),
    ],
)
def test_device_of_prefers_the_requested_and_current_gpu(
    name: str, asked: str | None, expected: int
) -> None:
    assert device_of(DEVICE_CLASSES[name], HOST, asked) == torch.device("cuda", expected)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("cuda-sm86", None),
        ("cuda-sm90", "cuda:0"),
        ("cuda-sm90", "cuda:7"),
        ("cuda-sm90", "cpu"),
        ("cuda-sm90", "tpu"),
        ("cuda-sm90", "meta"),
    ],
)
def test_devices_of_other_classes_are_refused(name: str, asked: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        device_of(DEVICE_CLASSES[name], HOST, asked)
    assert caught.value.code == "CP-DEVICE-CLASS"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("cpu", "environ"), [("ivybridge", {}), ("haswell", {"ONEDNN_MAX_CPU_ISA": "SSE41"})]
)
def test_the_cpu_must_run_the_host_code(cpu: str, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="its host code is made for cpu-x86-64-v3"):
        device_of(SM90, describe_host(x86(cpu, INTEL, gpus=(H100,)), environ))


@pytest.mark.usefixtures("gpus")
def test_a_freeze_aims_at_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = mlp(), torch.device("cuda", 1)
    monkeypatch.setattr(devices, "this_host", lambda: HASWELL)
    monkeypatch.setattr("freezer.freezing.target.detect", lambda: HOST)
    assert resolve_device(model, "auto", None) == ("auto", CPU)
    assert resolve_device(None, "auto", "cpu") == ("auto", CPU)
    assert resolve_device(model, "auto", "cuda:1") == ("cuda-sm90", gpu)
    assert resolve_device(model, "cuda-sm80", None) == ("cuda-sm80", torch.device("cuda", 0))
    monkeypatch.setattr("freezer.freezing.target.device_of_model", lambda *_: gpu)
    for name in ("auto", "cuda-sm90"):
        assert resolve_device(model, name, None) == ("cuda-sm90", gpu)
    assert resolve_device(model, "cuda-sm80", None) == ("cuda-sm80", torch.device("cuda", 0))
    assert resolve_device(model, HERE, None) == (HERE, CPU)
    with pytest.raises(UsageError, match=f"got device cuda:1 for {HERE}, which runs on a CPU"):
        resolve_device(model, HERE, "cuda:1")


@pytest.mark.usefixtures("gpus")
def test_gpu_targets_have_one_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freezer.freezing.target.detect", lambda: HOST)
    target = target_here("cuda-sm90", (4, 2), "cuda:1")
    assert (target.thread_counts, target.device, target.at(2).device) == (
        (4,),
        torch.device("cuda", 1),
        torch.device("cuda", 1),
    )
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UsageError, match="NVIDIA_TF32_OVERRIDE=1 in the environment"):
        target_here("cuda-sm90", 1)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("device", "seen"), [(None, (80, 90, 90)), ("cuda:1", (90,)), ("cuda:7", ())]
)
def test_cuda_here_lists_requested_devices(device: str | None, seen: Sequence[int]) -> None:
    found = cuda_here(None if device is None else torch.device(device))
    assert tuple(capability for _, capability in found.devices) == seen
    assert found.runtime == "12.8"


@pytest.mark.usefixtures("gpus")
def test_with_index_adds_the_current_gpu() -> None:
    assert with_index("cuda") == torch.device("cuda", 2)
    assert with_index("cpu") == CPU
    assert class_of(torch.device("cuda:0")) == "cuda-sm80"
    with pytest.raises(UsageError, match="got device cuda:9, and this process sees no such GPU"):
        class_of(torch.device("cuda:9"))
