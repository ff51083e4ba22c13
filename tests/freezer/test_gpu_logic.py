"""GPU logic that needs no GPU: build settings, input contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import freezer
from freezer.artifact import Payload
from freezer.errors import ContractError, IncompatibleError, UsageError
from freezer.freezing.choices import select
from freezer.freezing.lowering.inductor.compilation import configuration, known
from freezer.freezing.lowering.inductor.compiler_trial import cuda_toolkit
from freezer.freezing.lowering.isa_check import host_class
from freezer.freezing.recipes import KEPT_EAGER, RECIPES, made_for
from freezer.freezing.target import Target
from freezer.hardware import DEVICE_CLASSES
from freezer.runtime.contract import OpenPayload
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.torch_settings import full_on_gpu, plain_precision, tf32_on_gpu
from freezer.spec import InputSpec, OutputSpec, OutputStructure, TensorSpec
from freezer.store import Store
from tests.support.gpu_models import settings_on_gpu

SM90 = DEVICE_CLASSES["cuda-sm90"]
GPU = torch.device("cuda", 1)
TARGET = Target(device_class=SM90, num_threads=4, device=GPU)
FIXED = Payload(
    path="payloads/one.pt2",
    digest="sha256:" + 64 * "0",
    size_bytes=1,
    kind="inductor",
    num_threads=None,
)


@pytest.mark.parametrize("name", ["inductor-frozen", "inductor-max-autotune"])
def test_inductor_settings_for_a_gpu(name: str) -> None:
    recipe = made_for(RECIPES[name], "cuda")
    config = configuration(recipe.settings["inductor"], TARGET, beside=False)
    assert (config["cpp.march"], config["cpp.simdlen"], config["cuda.arch"]) == (
        "x86-64-v3",
        256,
        "90",
    )
    assert config["cpp.weight_prepack"] is False
    assert config["max_autotune"] is (name == "inductor-max-autotune")
    assert "TRITON" in str(config["max_autotune_gemm_backends"])
    assert not [setting for setting in config if setting not in known(config)]
    assert host_class(SM90).name == "cpu-x86-64-v3"


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


def test_full_on_gpu_restores_the_settings() -> None:
    before = settings_on_gpu()
    assert before["conv"] == "tf32"
    with full_on_gpu():
        inside = settings_on_gpu()
        with full_on_gpu(), plain_precision(GPU):
            assert settings_on_gpu() == inside
        assert settings_on_gpu() == inside
    assert "tf32" not in inside.values()
    reduced = [
        value[0] if isinstance(value, tuple) else value
        for name, value in inside.items()
        if name.startswith("allow")
    ]
    assert reduced == [False, False]
    assert settings_on_gpu() == before
    torch.set_float32_matmul_precision("high")
    try:
        high = settings_on_gpu()
        with full_on_gpu():
            assert settings_on_gpu()["matmul"] != "tf32"
            assert torch.get_float32_matmul_precision() == "highest"
        assert settings_on_gpu() == high
    finally:
        torch.set_float32_matmul_precision("highest")


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


def model_on(device: torch.device) -> FrozenModel:
    return FrozenModel(
        spec=InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=(2, 4)),)),
        outputs=(OutputSpec(name="output", dtype="float32", rank=2),),
        structure=OutputStructure(kind="tensor"),
        payloads=[OpenPayload(payload=FIXED, run=lambda x: [x])],
        options=CallOptions(device=device),
    )


def test_inputs_on_other_devices_are_refused() -> None:
    with pytest.raises(
        ContractError,
        match=r"input 'x': got device cpu, expected cuda:1; move it with \.to\('cuda:1'\)",
    ):
        model_on(GPU)(x=torch.ones(2, 4))
    with pytest.raises(
        ContractError, match=r"input 'x': got device meta, expected cpu; move it with \.to\('cpu'\)"
    ):
        model_on(torch.device("cpu"))(x=torch.ones(2, 4, device="meta"))
    assert model_on(GPU).device == GPU


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
