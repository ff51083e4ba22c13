"""NVML through ctypes, against a small library in its place: the real calls, structures and error codes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from freezer.hardware import nvml
from freezer.hardware.host import this_host
from freezer.hardware.nvml import GpuFacts, Nvml, NvmlError, Reading, num_others, opened


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nvml") / "libfake-nvml.so"
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return str(path)


def test_what_a_machine_has_is_told_without_bindings(library: str) -> None:
    with opened(library) as found:
        assert found.driver() == "550.54.15"
        assert found.gpus() == (
            GpuFacts(uuid="GPU-first", capability=90, name="NVIDIA H200"),
            GpuFacts(uuid="GPU-second", capability=86, name="NVIDIA H200"),
        )


def test_how_a_gpu_is_doing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert found.reading("GPU-second").temperature_c is None, "this driver does not tell it"
        with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID: Unknown Error"):
            found.reading("GPU-third")


@pytest.mark.parametrize("num", [31, 32, 33, 500])
def test_all_processes_are_counted_however_many(library: str, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", str(num))
    monkeypatch.setenv("FAKE_NVML_PID", "1")
    with opened(library) as found:
        assert found.reading("GPU-first").others == num - 1


def test_a_driver_that_does_not_answer_is_a_reason(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_INIT", "9")
    with pytest.raises(NvmlError, match="nvmlInit_v2: Driver Not Loaded"):
        Nvml(library)
    with pytest.raises(NvmlError, match=r"libno-such-nvml\.so cannot be opened"):
        Nvml("libno-such-nvml.so")


def test_the_host_has_what_nvml_tells(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    this_host.cache_clear()
    try:
        monkeypatch.setattr(nvml, "opened", lambda: opened(library))
        host = this_host()
        assert [(gpu.uuid, gpu.capability, gpu.name) for gpu in host.gpus] == [
            ("GPU-first", 90, "NVIDIA H200"),
            ("GPU-second", 86, "NVIDIA H200"),
        ]
        assert (host.driver, host.no_gpu) == ("550.54.15", "")
    finally:
        this_host.cache_clear()


def test_this_process_is_not_another_even_where_its_id_is_not_listed() -> None:
    assert num_others([], 7) == 0
    assert num_others([7], 7) == 0
    assert num_others([7, 8, 9], 7) == 2
    assert num_others([1], 7) == 0, "in a container its own id is another"
    assert num_others([1, 2], 7) == 1
