"""The whole path on a GPU: freeze, judge, write, load, verify.

Run `pytest tests/gpu -m gpu` on a machine with a GPU.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact import Artifact
from freezer.errors import ContractError, IncompatibleError
from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
from freezer.freezing.models import Dims
from freezer.freezing.recipes import INDUCTOR_SETTINGS, RECIPES, is_exact
from freezer.hardware import cuda as nvml
from freezer.runtime.devices import visible
from freezer.serving.verify import verify
from freezer.spec import Accuracy, Dim, Limits, Precision
from freezer.store import Store
from tests.support.gpu_models import SHAPES, made, settings_on_gpu
from tests.support.models import Counter
from tests.support.steps import ANY_SPEED, QUICK, with_golden

pytestmark = [
    # torch, in the first matrix product of a thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    # torch, whose flatten_parameters() leaves bfloat16 out
    pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning"),
    # torch 2.11 where it reads an exported program
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

OPTIONS = FreezeOptions(
    limits=ANY_SPEED,
    policy=replace(QUICK, accept_noise=True),  # of other tests on the same GPU
    num_threads=1,
)
RECIPES_ON_GPU = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.portable and not recipe.packages and is_exact(name)
]
QUICK_RECIPES = ["torchscript-frozen", "torchscript-optimized", "inductor-frozen"]
DIMS: Dims = {"x": {0: Dim(name="batch", min=1, max=8)}}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Case:
    """A model, its example input, and the result of freezing it."""

    model: nn.Module
    x: Tensor
    result: FreezeResult

    @property
    def artifact(self) -> Artifact:
        assert self.result.artifact is not None, self.result.reason
        return self.result.artifact

    def check(
        self, loaded: freezer.FrozenModel, x: Tensor | None = None, tolerance: float = 1e-4
    ) -> None:
        """Compare an answer with eager's."""
        given = self.x if x is None else x
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(x=given), self.model(given), rtol=tolerance, atol=tolerance
            )


def frozen(
    model: nn.Module,
    x: Tensor,
    out: Path,
    recipe: str = "torchscript-frozen",
    options: FreezeOptions = OPTIONS,
    dims: Dims | None = None,
) -> Case:
    if recipe.startswith("inductor"):
        missing = [name for name in ("g++", "objdump") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"{recipe} needs {', '.join(missing)} to build")
    options = replace(options, recipes=[recipe])
    return Case(model, x, freeze(model, {"x": x}, out=out, dims=dims, options=options))


@pytest.fixture(scope="module")
def mlp(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return frozen(*made("mlp", torch.float32, gpu), tmp_path_factory.mktemp("mlp") / "out")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("recipe", RECIPES_ON_GPU)
@pytest.mark.parametrize("name", SHAPES)
def test_every_recipe_freezes_every_model(
    name: str, recipe: str, dtype: torch.dtype, gpu: torch.device, gpu_class: str, tmp_path: Path
) -> None:
    if recipe == "inductor-max-autotune" and (
        dtype != torch.float16 or name not in ("mlp", "resnet")
    ):
        pytest.skip("takes minutes, so it runs on two models")
    case = frozen(*made(name, dtype, gpu), tmp_path / "out", recipe)
    manifest = case.artifact.manifest
    assert case.result.verdict == "published"
    assert (manifest.device_class, manifest.recipe.name) == (gpu_class, recipe)
    assert manifest.reference == "float64", manifest.drift.reference_note
    assert set(manifest.recipe.settings["precision"].values()) == {False}
    assert manifest.needs.cuda is not None
    assert manifest.needs.cuda.runtime == torch.version.cuda
    assert manifest.toolchain["gpu"] == torch.cuda.get_device_name(gpu)
    assert manifest.latency is not None
    assert manifest.latency.device["timed_by"] == "device events"
    loaded = freezer.load(case.artifact.folder, strict=True)
    assert loaded.device == gpu
    case.check(loaded, tolerance=TOLERANCE[dtype])
    assert verify(case.artifact.folder).device_class == gpu_class


class Encoder(nn.TransformerEncoderLayer):
    """One layer, whose input is called x."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_what_eager_approximates_is_exact(gpu: torch.device, tmp_path: Path) -> None:
    """On a GPU, `nn.TransformerEncoderLayer` computes GELU by tanh, which is off by 1e-4."""
    torch.manual_seed(0)
    layer = Encoder(64, 4, 128, activation="gelu", batch_first=True).eval()
    x = torch.randn(4, 16, 64)
    case = frozen(layer.to(gpu), x.to(gpu), tmp_path / "out", "inductor-frozen")
    assert case.artifact.manifest.recipe.capture == "export"
    loaded = freezer.load(case.artifact.folder)
    with torch.no_grad():
        reference = layer.cpu().double()(x.double())
    torch.testing.assert_close(loaded(x=case.x).cpu().double(), reference, rtol=1e-5, atol=1e-5)


def test_points_have_payloads_of_their_own(gpu: torch.device, tmp_path: Path) -> None:
    options = replace(OPTIONS, points=[{"batch": 1}, {"batch": 8}])
    case = frozen(
        *made("mlp", torch.float32, gpu), tmp_path / "out", "inductor-frozen", options, DIMS
    )
    loaded = freezer.load(case.artifact.folder)
    for batch in (1, 3, 8):
        case.check(loaded, case.x[:1].expand(batch, -1).contiguous())
    payload = loaded.payload_for({"batch": 1})
    assert (payload.num_threads, payload.layouts) == (None, {})
    settings = case.artifact.manifest.recipe.settings["inductor"]
    assert set(INDUCTOR_SETTINGS) <= set(settings)
    assert settings["cpp.weight_prepack"] is False


def test_state_is_kept_as_in_eager(gpu: torch.device, tmp_path: Path) -> None:
    case = frozen(Counter().eval().to(gpu), torch.zeros(2, 4, device=gpu), tmp_path / "out")
    loaded = freezer.load(case.artifact.folder)
    assert [float(loaded(x=case.x)[0, 0]) for _ in range(4)] == [1, 2, 3, 4]


def test_the_canary_runs_on_the_device(mlp: Case, tmp_path: Path) -> None:
    damaged = with_golden(mlp.artifact, tmp_path / "damaged", lambda y: y + 1)
    with pytest.raises(IncompatibleError, match="canary"):
        freezer.load(damaged.folder)


@pytest.mark.skipif(
    "len(visible()) < 2 or visible()[0][1] != visible()[1][1]", reason="needs two GPUs of one class"
)
@pytest.mark.parametrize("recipe", ["torchscript-frozen", "inductor-frozen"])
def test_a_payload_runs_on_the_given_index(recipe: str, gpu: torch.device, tmp_path: Path) -> None:
    other = visible()[1][0]
    case = frozen(*made("mlp", torch.float32, gpu), tmp_path / "out", recipe)
    before = torch.cuda.memory_allocated(gpu)
    loaded = freezer.load(case.artifact.folder, device=str(other))
    assert loaded.device == other
    torch.testing.assert_close(
        loaded(x=case.x.to(other)).cpu(), case.model(case.x).cpu(), rtol=1e-4, atol=1e-4
    )
    assert torch.cuda.memory_allocated(gpu) == before
    with pytest.raises(ContractError, match=f"got device {gpu}, expected {other}"):
        loaded(x=case.x)


def test_the_captured_program_serves_if_nothing_is_faster(
    gpu: torch.device, gpu_class: str, tmp_path: Path
) -> None:
    options = replace(OPTIONS, limits=Limits(speedup_min=1000.0))
    case = frozen(*made("mlp", torch.float32, gpu), tmp_path / "out", options=options)
    manifest = case.artifact.manifest
    assert case.result.verdict == manifest.verdict == "kept-eager"
    assert (manifest.device_class, manifest.recipe.name) == (gpu_class, "captured")
    loaded = freezer.load(case.artifact.folder)
    assert loaded.device == gpu
    case.check(loaded)


@pytest.mark.parametrize("recipe", QUICK_RECIPES)
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_no_call_computes_in_tf32(
    name: str, recipe: str, gpu: torch.device, tmp_path: Path
) -> None:
    """Even if the process allows it: TF32 keeps 10 bits, so the error would be above 1e-4."""
    case = frozen(*made(name, torch.float32, gpu), tmp_path / "out", recipe)
    loaded = freezer.load(case.artifact.folder)
    with torch.no_grad():
        reference = case.model.double()(case.x.double())
    torch.set_float32_matmul_precision("high")
    try:
        before = settings_on_gpu()
        assert (before["matmul"], before["conv"]) == ("tf32", "tf32")
        error = (loaded(x=case.x).double() - reference).abs().max()
        assert float(error / reference.abs().max()) < 1e-5
        assert settings_on_gpu() == before, "the settings of the process are restored"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("name", SHAPES)
def test_lower_precision_keeps_its_budget(
    name: str, precision: Precision, gpu: torch.device, gpu_class: str, tmp_path: Path
) -> None:
    recipe = f"inductor-{precision}"
    options = replace(OPTIONS, precision=[precision], accuracy=Accuracy(sqnr_db_min=20.0))
    case = frozen(*made(name, torch.float32, gpu), tmp_path / "out", recipe, options)
    manifest = case.artifact.manifest
    assert case.result.verdict == "published", case.result.reason
    assert manifest.recipe.precision == precision
    assert manifest.accuracy is not None
    assert manifest.accuracy.bounds["sqnr_db"] >= 20
    loaded = freezer.load(case.artifact.folder)
    before = settings_on_gpu()
    with torch.no_grad():
        got, reference = loaded(x=case.x), case.model.double()(case.x.double())
    assert got.dtype == torch.float32
    error = float((got.double() - reference).abs().max() / reference.abs().max())
    assert 1e-6 < error < 0.1, "the lower precision ran"
    assert settings_on_gpu() == before
    assert verify(case.artifact.folder).device_class == gpu_class


def test_a_version_serves_gpu_and_cpu(
    gpu: torch.device, gpu_class: str, mlp: Case, tmp_path: Path
) -> None:
    options = replace(OPTIONS, device_class="portable")
    portable = frozen(
        *made("mlp", torch.float32, torch.device("cpu")), tmp_path / "portable", "portable", options
    )
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish(
        "mlp",
        source_key="key",
        artifacts=[mlp.artifact, portable.artifact],
    )
    for device, device_class in ((None, gpu_class), ("cpu", "portable")):
        loaded = freezer.load("mlp", store=str(store.root), device=device)
        assert loaded.manifest is not None
        assert loaded.manifest.device_class == device_class
        assert loaded.device.type == (device or "cuda")
    assert loaded.ladder[0].reason == "device_mismatch"
    found = verify("mlp", store=str(store.root), speed=True)
    assert found.speed is not None
    assert found.speed.median_ms[gpu_class] > 0


def test_nvml_and_torch_agree(gpu: torch.device) -> None:
    try:
        with nvml.opened():
            known = {item.uuid: item.capability for item in nvml.gpus()}
            uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
            major, minor = torch.cuda.get_device_capability(gpu)
            assert known[uuid] == major * 10 + minor
            assert nvml.num_other_processes(uuid) >= 0
    except nvml.NvmlError as error:
        pytest.skip(f"NVML is not available: {error}")
