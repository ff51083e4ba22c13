"""The whole path on a GPU: freeze, judge, write, load, verify. Run it with `pytest tests/gpu -m gpu` on a machine that has one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact.folder import GOLDEN_OUTPUTS, MEDIA_SAFETENSORS, Artifact, file_ref
from freezer.errors import ContractError, CudaGraphsError, IncompatibleError, UsageError
from freezer.freezing.freeze import FreezeResult, freeze
from freezer.freezing.options import FreezeOptions
from freezer.freezing.recipes.inductor_settings import COMMON
from freezer.freezing.recipes.recipes import RECIPES
from freezer.hardware.nvml import NvmlError, opened
from freezer.limits import Limits
from freezer.runtime.cuda import visible
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.precision import settings_on_gpu
from freezer.runtime.tensor_files import load_tensors, save_tensors
from freezer.serving.verify import verify
from freezer.spec.inputs import Dim
from freezer.store.store import Store
from tests.gpu.models import SHAPES, Counter, made
from tests.steps import QUICK, rewritten

ANY_SPEED = Limits(speedup_min=0.0)
GPU_OPTIONS = FreezeOptions(limits=ANY_SPEED, policy=QUICK, num_threads=1)
SERVED = [name for name, recipe in RECIPES.items() if not recipe.portable]
BATCH = Dim(name="batch", min=1, max=8)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def frozen(
    model: nn.Module, x: Tensor, out: Path, recipe: str = "torchscript-frozen", *, limits: Limits = ANY_SPEED, dynamic: bool = False
) -> FreezeResult:
    dims = {"x": {0: BATCH}} if dynamic else None
    return freeze(
        model, {"x": x}, out=out, dims=dims, options=FreezeOptions(recipes=[recipe], limits=limits, policy=QUICK, num_threads=1)
    )


def artifact_of(result: FreezeResult) -> Artifact:
    assert result.artifact is not None, (result.verdict, result.reason, dict(result.failures), dict(result.tracebacks))
    return result.artifact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("name", SHAPES)
def test_every_recipe_of_every_model(
    name: str, recipe: str, dtype: torch.dtype, gpu: torch.device, gpu_class: str, tmp_path: Path, compiles: Callable[[str], None]
) -> None:
    compiles(recipe)
    if recipe == "inductor-max-autotune" and (dtype != torch.float16 or name not in ("mlp", "resnet")):
        pytest.skip("it takes minutes, and is tried on two models")
    model, x = made(name, dtype, gpu)
    result = frozen(model, x, tmp_path / "out", recipe)
    artifact = artifact_of(result)
    manifest = artifact.manifest
    assert (result.verdict, manifest.device_class, manifest.recipe.name) == ("published", gpu_class, recipe)
    assert manifest.reference == "float64", manifest.drift.reference_note
    assert manifest.recipe.settings["precision"] == {"tf32": False, "reduced_precision_reductions": False}
    assert manifest.needs.cuda is not None
    assert manifest.needs.cuda.runtime == torch.version.cuda
    assert manifest.toolchain["gpu"] == torch.cuda.get_device_name(gpu)
    assert manifest.latency is not None
    assert manifest.latency.device["timed_by"] == "device events"
    loaded = freezer.load(artifact.folder, strict=True)
    assert loaded.device == gpu
    got = loaded(x=x)
    assert got.device == gpu
    with torch.no_grad():
        expected = model(x)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert verify(artifact.folder).device_class == gpu_class


def test_sizes_vary_and_points_have_payloads_of_their_own(
    gpu: torch.device, tmp_path: Path, compiles: Callable[[str], None]
) -> None:
    compiles("inductor-frozen")
    model, x = made("mlp", torch.float32, gpu)
    options = replace(GPU_OPTIONS, recipes=["inductor-frozen"], points=[{"batch": 1}, {"batch": 8}])
    result = freeze(model, {"x": x}, out=tmp_path / "out", dims={"x": {0: BATCH}}, options=options)
    loaded = freezer.load(artifact_of(result).folder)
    for batch in (1, 3, 8):
        given = x[:1].expand(batch, -1).contiguous()
        torch.testing.assert_close(loaded(x=given), model(given), rtol=1e-4, atol=1e-4)
    assert loaded.payload_for({"batch": 1}).num_threads is None


@pytest.fixture(scope="module")
def mlp(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    model, x = made("mlp", torch.float32, gpu)
    return artifact_of(frozen(model, x, tmp_path_factory.mktemp("mlp") / "out"))


def input_of(gpu: torch.device) -> Tensor:
    return made("mlp", torch.float32, gpu)[1]


def test_a_torchscript_file_that_names_a_gpu_is_frozen_there(gpu: torch.device, tmp_path: Path) -> None:
    model, x = made("lstm", torch.float32, gpu)
    with torchscript_deprecations_silenced(), torch.no_grad():
        traced = torch.jit.trace(model, x)
        torch.jit.save(traced, str(tmp_path / "model.jit"))
        source = torch.jit.load(str(tmp_path / "model.jit"), map_location=gpu)
    artifact = artifact_of(frozen(source, x, tmp_path / "out"))
    assert artifact.manifest.recipe.capture == "as-is"
    torch.testing.assert_close(freezer.load(artifact.folder)(x=x), model(x), rtol=1e-4, atol=1e-4)


def test_inputs_elsewhere_are_refused(gpu: torch.device, mlp: Artifact) -> None:
    loaded = freezer.load(mlp.folder)
    with pytest.raises(ContractError, match=rf"input 'x': got device cpu, expected {gpu}; move it with \.to\('{gpu}'\)"):
        loaded(x=input_of(gpu).cpu())


def test_state_is_kept_as_eager_keeps_it(gpu: torch.device, tmp_path: Path) -> None:
    x = torch.zeros(2, 4, device=gpu)
    artifact = artifact_of(frozen(Counter().eval().to(gpu), x, tmp_path / "out"))
    loaded = freezer.load(artifact.folder)
    assert [float(loaded(x=x)[0, 0]) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(CudaGraphsError, match="a call changes its state"):
        freezer.load(artifact.folder, cuda_graphs=True)


def test_the_canary_runs_on_the_device(gpu: torch.device, mlp: Artifact, tmp_path: Path) -> None:
    damaged = Artifact.read(Path(shutil.copytree(mlp.folder, tmp_path / "damaged")))
    assert freezer.load(damaged.folder).device == gpu
    swapped = damaged.folder / "golden" / "outputs.safetensors"
    shifted = {name: tensor + 1 for name, tensor in load_tensors(swapped).items()}
    swapped.chmod(0o644)
    swapped.unlink()
    save_tensors(shifted, swapped)
    files = [item for item in damaged.manifest.files if item.path != GOLDEN_OUTPUTS]
    rewritten(damaged, files=(*files, file_ref(damaged.folder, GOLDEN_OUTPUTS, MEDIA_SAFETENSORS)))
    with pytest.raises(IncompatibleError, match="canary"):
        freezer.load(damaged.folder)


def test_the_ladder_refuses_by_name(gpu_class: str, mlp: Artifact, tmp_path: Path) -> None:
    future = Artifact.read(Path(shutil.copytree(mlp.folder, tmp_path / "future")))
    needs = future.manifest.needs
    assert needs.cuda is not None
    needs = replace(needs, cuda=replace(needs.cuda, driver="9999.1"))
    rewritten(future, needs=needs)
    with opened() as nvml:
        driver = nvml.driver()
    with pytest.raises(IncompatibleError, match=f"{gpu_class}: driver_too_old: got driver {driver}, expected driver 9999.1"):
        freezer.load(future.folder)
    with pytest.raises(IncompatibleError, match="device_mismatch: got an artifact for a GPU, expected device cpu"):
        freezer.load(mlp.folder, device="cpu")
    with pytest.raises(IncompatibleError, match=r"no_cuda: got no such GPU|no_cuda"):
        freezer.load(mlp.folder, device=f"cuda:{torch.cuda.device_count()}")


def test_a_class_that_this_gpu_is_not_of_is_no_target(gpu: torch.device, gpu_class: str, tmp_path: Path) -> None:
    other = "cuda-sm75" if gpu_class != "cuda-sm75" else "cuda-sm80"
    model, x = made("mlp", torch.float32, gpu)
    with pytest.raises(UsageError, match=f"cannot build for {other}: no GPU that this process sees has this compute capability"):
        freeze(model, {"x": x}, out=tmp_path / "out", options=FreezeOptions(device_class=other))


@pytest.mark.skipif("len(visible()) < 2", reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["torchscript-frozen", "inductor-frozen"])
def test_a_payload_runs_on_the_index_that_was_asked_for(
    recipe: str, gpu: torch.device, tmp_path: Path, compiles: Callable[[str], None]
) -> None:
    compiles(recipe)
    other = visible()[1][0]
    if visible()[0][1] != visible()[1][1]:
        pytest.skip("the GPUs are of two classes")
    model, x = made("mlp", torch.float32, gpu)
    artifact = artifact_of(frozen(model, x, tmp_path / "out", recipe))
    before = torch.cuda.memory_allocated(gpu)
    loaded = freezer.load(artifact.folder, device=str(other))
    assert loaded.device == other
    torch.testing.assert_close(loaded(x=x.to(other)).cpu(), model(x).cpu(), rtol=1e-4, atol=1e-4)
    assert torch.cuda.memory_allocated(gpu) == before
    with pytest.raises(ContractError, match=f"got device {gpu}, expected {other}"):
        loaded(x=x)


@pytest.mark.skipif("len(visible()) < 2", reason="needs two GPUs")
def test_a_graph_that_names_a_gpu_is_refused_on_another(gpu: torch.device, tmp_path: Path) -> None:
    model, x = made("lstm", torch.float32, gpu)
    artifact = artifact_of(frozen(model, x, tmp_path / "out"))
    with pytest.raises(IncompatibleError, match=f"its graph makes tensors on {gpu}, and {visible()[1][0]} was asked for"):
        freezer.load(artifact.folder, device=str(visible()[1][0]))


@pytest.mark.parametrize("recipe", ["torchscript-frozen", "torchscript-optimized", "inductor-frozen"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "attention"])
def test_cuda_graphs_answer_as_calls_do(
    name: str, recipe: str, gpu: torch.device, tmp_path: Path, compiles: Callable[[str], None]
) -> None:
    compiles(recipe)
    model, x = made(name, torch.float32, gpu)
    folder = artifact_of(frozen(model, x, tmp_path / "out", recipe)).folder
    plain, graphed = freezer.load(folder), freezer.load(folder, cuda_graphs=True)
    inputs = [x, x * 2, -x]
    results = [graphed(x=given) for given in inputs]
    for given, got in zip(inputs, results, strict=True):
        torch.testing.assert_close(got, plain(x=given), rtol=1e-5, atol=1e-5)
    assert len({result.data_ptr() for result in results}) == 3, "results are copies"


def test_cuda_graphs_are_safe_from_many_threads_and_streams(gpu: torch.device, mlp: Artifact) -> None:
    graphed, x = freezer.load(mlp.folder, cuda_graphs=True), input_of(gpu)
    plain = freezer.load(mlp.folder)
    wrong: list[int] = []

    def serve(number: int) -> None:
        stream = torch.cuda.Stream(gpu)
        stream.wait_stream(torch.cuda.default_stream(gpu))
        with torch.cuda.stream(stream):
            for step in range(50):
                given = x * (number + 1) + step
                if not torch.allclose(graphed(x=given), plain(x=given), rtol=1e-4, atol=1e-4):
                    wrong.append(number)
        stream.synchronize()

    torch.cuda.synchronize(gpu)
    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_cuda_graphs_of_sizes_that_vary_are_refused(gpu: torch.device, tmp_path: Path) -> None:
    model, x = made("mlp", torch.float32, gpu)
    artifact = artifact_of(frozen(model, x, tmp_path / "out", dynamic=True))
    with pytest.raises(CudaGraphsError, match="it has no payload of one size"):
        freezer.load(artifact.folder, cuda_graphs=True)


def test_where_nothing_beats_eager_the_captured_program_serves_on_the_gpu(
    gpu: torch.device, gpu_class: str, tmp_path: Path
) -> None:
    model, x = made("mlp", torch.float32, gpu)
    result = frozen(model, x, tmp_path / "out", limits=Limits(speedup_min=1000.0))
    assert result.verdict == "kept-eager"
    artifact = artifact_of(result)
    assert (artifact.manifest.verdict, artifact.manifest.device_class) == ("kept-eager", gpu_class)
    assert artifact.manifest.recipe.name == "captured"
    loaded = freezer.load(artifact.folder)
    assert loaded.device == gpu
    torch.testing.assert_close(loaded(x=x), model(x), rtol=1e-4, atol=1e-4)


def rounding(loaded: FrozenModel, model: nn.Module, x: Tensor) -> float:
    """How far a loaded model is from float64, as a part of the largest value."""
    with torch.no_grad():
        reference = model.double()(x.double())
        model.float()
    return float((loaded(x=x).double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("recipe", ["torchscript-frozen", "torchscript-optimized", "inductor-frozen"])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_no_call_computes_in_tf32_whatever_the_process_allows(
    name: str, recipe: str, gpu: torch.device, tmp_path: Path, compiles: Callable[[str], None]
) -> None:
    compiles(recipe)
    model, x = made(name, torch.float32, gpu)
    loaded = freezer.load(artifact_of(frozen(model, x, tmp_path / "out", recipe)).folder)
    torch.set_float32_matmul_precision("high")
    try:
        before = settings_on_gpu()
        assert (before["matmul"], before["conv"]) == ("tf32", "tf32")
        assert rounding(loaded, model, x) < 1e-5, "TF32 keeps 10 bits: it would be off by 1e-4 and more"
        assert settings_on_gpu() == before, "the process has its own settings back"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_version_with_a_gpu_s_and_a_portable_artifact_is_timed_and_served(
    gpu: torch.device, gpu_class: str, mlp: Artifact, tmp_path: Path
) -> None:
    model, x = made("mlp", torch.float32, torch.device("cpu"))
    options = replace(GPU_OPTIONS, recipes=["portable"], device_class="portable")
    portable = artifact_of(freeze(model, {"x": x}, out=tmp_path / "portable", options=options))
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts={gpu_class: mlp, "portable": portable}, carried={})
    loaded = freezer.load("mlp", store=str(store.root))
    assert loaded.manifest is not None
    assert (loaded.manifest.device_class, loaded.device) == (gpu_class, gpu)
    on_cpu = freezer.load("mlp", store=str(store.root), device="cpu")
    assert on_cpu.manifest is not None
    assert on_cpu.manifest.device_class == "portable"
    assert on_cpu.ladder[0].reason == "device_mismatch"
    found = verify("mlp", store=str(store.root), speed=True)
    assert found.speed is not None
    assert found.speed.median_ms[gpu_class] > 0


def test_nvml_and_torch_tell_the_same(gpu: torch.device) -> None:
    try:
        with opened() as nvml:
            known = {item.uuid: item for item in nvml.gpus()}
            uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
            assert known[uuid].name == torch.cuda.get_device_name(gpu)
            reading = nvml.reading(uuid)
    except NvmlError as error:
        pytest.skip(f"NVML does not tell: {error}")
    assert reading.sm_clock_mhz is None or reading.sm_clock_mhz > 0


def test_the_settings_of_a_build_are_in_the_manifest(gpu: torch.device, tmp_path: Path, compiles: Callable[[str], None]) -> None:
    compiles("inductor-frozen")
    model, x = made("mlp", torch.float32, gpu)
    artifact = artifact_of(frozen(model, x, tmp_path / "out", "inductor-frozen"))
    settings = artifact.manifest.recipe.settings["inductor"]
    assert set(COMMON) <= set(settings)
    assert settings["cpp.weight_prepack"] is False
    (payload,) = artifact.manifest.payloads
    assert (payload.num_threads, payload.layouts) == (None, {})
