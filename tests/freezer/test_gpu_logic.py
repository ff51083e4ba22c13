"""GPU logic that needs no GPU: build settings, input contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import freezer
from freezer.errors import IncompatibleError, UsageError
from freezer.freezing.choices import select
from freezer.freezing.lowering.inductor.compiler_trial import cuda_toolkit
from freezer.freezing.recipes import KEPT_EAGER, RECIPES, made_for
from freezer.freezing.target import Target
from freezer.hardware import DEVICE_CLASSES
from freezer.runtime.torch_settings import full_on_gpu, plain_precision, tf32_on_gpu
from freezer.store import Store
from tests.support.gpu_models import settings_on_gpu

SM90 = DEVICE_CLASSES["cuda-sm90"]
GPU = torch.device("cuda", 1)
TARGET = Target(device_class=SM90, num_threads=4, device=GPU)


def test_headers_of_packages_stand_in_for_a_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("include/cuda_runtime_api.h", "lib/libcudart.so.13")
    for file in files:
        path = tmp_path / "packages" / "nvidia" / "cu13" / file
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with cuda_toolkit(tmp_path):
        home = Path(str(cpp_extension.CUDA_HOME))
        assert (home / "include" / "cuda_runtime_api.h").exists()
        assert (home / "lib64" / "libcudart.so").exists()
    assert cpp_extension.CUDA_HOME is None
    assert not home.exists()


def test_gpu_recipes_fix_the_precision() -> None:
    for recipe in (*RECIPES.values(), KEPT_EAGER):
        assert made_for(recipe, "cpu") is recipe
        found = made_for(recipe, "cuda")
        tf32 = {"tf32": recipe.precision == "tf32"}
        assert found.settings["precision"] == {**tf32, "reduced_precision_reductions": False}
        assert not found.by_thread
        assert all(
            found.settings[name] == value
            for name, value in recipe.settings.items()
            if name != "inductor"
        )
    assert KEPT_EAGER not in select(["all"], portable=False)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_full_on_gpu_restores_the_settings(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        before = settings_on_gpu()
        with full_on_gpu():
            inside = settings_on_gpu()
            with full_on_gpu(), plain_precision(GPU):
                assert settings_on_gpu() == inside
            assert torch.get_float32_matmul_precision() == "highest"
        assert settings_on_gpu() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (before["conv"], "tf32" in inside.values()) == ("tf32", False)
    for name in ("allow_fp16", "allow_bf16"):
        assert inside[name] in (False, (False, True), (False, False)), name


def test_tf32_is_on_in_its_calls_alone() -> None:
    before = settings_on_gpu()
    with full_on_gpu():
        full = settings_on_gpu()
        with tf32_on_gpu():
            inside = settings_on_gpu()
            assert {inside[name] for name in ("matmul", "conv", "rnn")} == {"tf32"}
            assert inside["allow_fp16"] == full["allow_fp16"]
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(in_full).result() == full, "another thread needs full precision"
            assert settings_on_gpu() == inside
        assert settings_on_gpu() == full
    assert settings_on_gpu() == before
    with tf32_on_gpu():
        assert settings_on_gpu() == inside
    assert settings_on_gpu() == before


def in_full() -> dict[str, Any]:
    with full_on_gpu():
        return settings_on_gpu()


def test_cpu_artifacts_are_refused_for_a_gpu(published: Store) -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"device_mismatch: got an artifact for a CPU, expected device cuda:1",
    ) as caught:
        freezer.load("mlp", store=str(published.root), device="cuda:1")
    assert {refusal.reason for refusal in caught.value.ladder} == {"device_mismatch"}
    assert freezer.load("mlp", store=str(published.root), device="cpu").device == torch.device(
        "cpu"
    )
    with pytest.raises(UsageError, match="got device 'gpu', expected cpu, cuda or cuda:N"):
        freezer.load("mlp", store=str(published.root), device="gpu")
