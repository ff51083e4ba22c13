"""Targets: what this process can build for, and the thread count of a block of work."""

from __future__ import annotations

import pytest
import torch

from freezer.device_class import detect
from freezer.errors import UsageError
from freezer.target import host_fingerprint, target_here, threads, toolchain
from tests.steps import HERE


def test_this_machine_is_a_target() -> None:
    target = target_here(HERE, 3)
    assert (target.device_class.name, target.num_threads) == (HERE, 3)


@pytest.mark.skipif(detect().classes[:2] != ("cpu-x86-64-v4", "cpu-x86-64-v3"), reason="this process has no x86-64-v4")
def test_a_lesser_class_needs_its_limits() -> None:
    with pytest.raises(UsageError, match=r"may use more than cpu-x86-64-v3.*set ONEDNN_MAX_CPU_ISA=AVX2 .*before\s+Python starts"):
        target_here("cpu-x86-64-v3", 1)


def test_other_hardware_is_no_target() -> None:
    with pytest.raises(UsageError, match="cuda-sm75: this release has no lowering that builds for a GPU; name a CPU class"):
        target_here("cuda-sm75", 1)


def test_threads_are_put_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="shape"), threads(before + 1):
        torch.zeros(2).reshape(3)
    assert torch.get_num_threads() == before


def test_the_toolchain_and_the_host_are_recorded() -> None:
    assert toolchain()["torch"] == torch.__version__
    assert toolchain()["onednn"]
    assert host_fingerprint()["classes"] == list(detect().classes)
