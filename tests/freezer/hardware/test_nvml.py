"""NVML: what is read of each GPU, and which processes count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from freezer.hardware import machine, num_other_processes, this_host
from freezer.hardware.cuda import Gpu, num_others


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVML of a machine with two GPUs, and three processes on each."""

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "550.54.15",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": ["GPU-first", "GPU-second"].index,
        "nvmlDeviceGetUUID": ["GPU-first", "GPU-second"].__getitem__,
        "nvmlDeviceGetCudaComputeCapability": [(9, 0), (8, 6)].__getitem__,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [
            SimpleNamespace(pid=pid) for pid in (1, 2, os.getpid())
        ],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    this_host.cache_clear()
    yield
    this_host.cache_clear()


@pytest.mark.usefixtures("library")
def test_the_host_lists_nvml_gpus() -> None:
    host = this_host()
    assert host.gpus == (Gpu("GPU-first", 90), Gpu("GPU-second", 86))
    assert (host.driver, host.no_gpu) == ("550.54.15", "")


@pytest.mark.usefixtures("library")
def test_other_processes_on_a_gpu() -> None:
    assert num_other_processes("GPU-first") == 2


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_failing_library_means_no_gpu(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, function, fails)
    host = this_host()
    assert (host.gpus, host.no_gpu.startswith("an NVIDIA driver is here, but NVML: ")) == ((), True)


@pytest.mark.parametrize(
    ("listed", "expected"), [([], 0), ([7], 0), ([7, 8, 9], 2), ([1], 0), ([1, 2], 1)]
)
def test_this_process_is_not_counted(listed: list[int], expected: int) -> None:
    """In a container the list has other ids, and one of them counts as this process."""
    assert num_others(listed, 7) == expected
