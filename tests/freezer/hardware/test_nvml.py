"""NVML against a small library with the same functions."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from freezer.hardware import nvml
from freezer.hardware.machine import this_host
from freezer.hardware.nvml import Gpu, Nvml, NvmlError, Reading, num_others, opened


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nvml") / "libfake-nvml.so"
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return str(path)


def test_gpus_and_driver(library: str) -> None:
    with opened(library) as found:
        assert found.driver() == "550.54.15"
        assert found.gpus() == (
            Gpu("GPU-first", 90, "NVIDIA H200"),
            Gpu("GPU-second", 86, "NVIDIA H200"),
        )


def test_reading_of_a_gpu(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", "3")
    monkeypatch.setenv("FAKE_NVML_PID", str(os.getpid()))
    with opened(library) as found:
        expected = Reading(
            others=2,
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            temperature_c=41,
            throttled=("power cap", "thermal slowdown by hardware"),
        )
        assert found.reading("GPU-first") == expected
        assert found.reading("GPU-second").temperature_c is None, "not reported by this driver"
        with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID: Unknown Error"):
            found.reading("GPU-third")


@pytest.mark.parametrize("num", [31, 32, 33, 500])
def test_long_process_lists_are_counted(library: str, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", str(num))
    monkeypatch.setenv("FAKE_NVML_PID", "1")
    with opened(library) as found:
        assert found.reading("GPU-first").others == num - 1


def test_a_missing_or_failing_library_is_an_error(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_INIT", "9")
    with pytest.raises(NvmlError, match="nvmlInit_v2: Driver Not Loaded"):
        Nvml(library)
    with pytest.raises(NvmlError, match=r"libno-such-nvml\.so cannot be opened"):
        Nvml("libno-such-nvml.so")


def test_the_host_lists_nvml_gpus(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    this_host.cache_clear()
    try:
        monkeypatch.setattr(nvml, "opened", lambda: opened(library))
        host = this_host()
        assert [gpu.uuid for gpu in host.gpus] == ["GPU-first", "GPU-second"]
        assert (host.driver, host.no_gpu) == ("550.54.15", "")
    finally:
        this_host.cache_clear()


@pytest.mark.parametrize(("listed", "expected"), [([], 0), ([7], 0), ([7, 8, 9], 2), ([1], 0), ([1, 2], 1)])
def test_this_process_is_not_counted(listed: list[int], expected: int) -> None:
    """In a container the list has other ids, and one of them counts as this process."""
    assert num_others(listed, 7) == expected
