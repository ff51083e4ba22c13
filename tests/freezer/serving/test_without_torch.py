"""Serving where torch is not installed: engines answer alike, the rest is refused with a remedy."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import freezer
from freezer.artifact import Artifact
from freezer.errors import (
    USAGE,
    ContractError,
    IncompatibleError,
    MissingDependencyError,
    Refusal,
    UsageError,
    install_command,
)
from freezer.freezing.payload_sets import other_payloads
from freezer.freezing.payload_sets.slow_sizes import with_captured
from freezer.serving.process import LoadOptions
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.commands import finished
from tests.support.keys import make_pair
from tests.support.models import seeded
from tests.support.models_state import InPlace
from tests.support.steps import (
    BATCH,
    artifact_of,
    copy_of,
    flip_a_byte,
    python,
    quickly,
    random_inputs,
    with_golden,
)

BLOCK = "import sys\nsys.modules['torch'] = None\n"
"""Makes a process one in which torch is not found."""

CALL = """
import numpy as np, freezer
class Other:  # another library's tensor
    def __init__(self, array): self.array = array
    def __dlpack__(self, **kwargs): return self.array.__dlpack__(**kwargs)
    def __dlpack_device__(self): return self.array.__dlpack_device__()
class Table:
    def __init__(self, array): self.array = array
    def __array__(self, dtype=None, copy=None): return self.array
model = freezer.load(sys.argv[1])
answers = {}
for batch in (1, 2, 4):
    given = np.load(f"{sys.argv[2]}/{batch}.npz")
    for kind in (np.asarray, Other, Table):
        answer = model(image=kind(given["image"]), scale=kind(given["scale"]))
        for name, array in answer.items():
            answers[f"{batch}/{kind.__name__}/{name}"] = array
np.savez(sys.argv[2] + "/answers.npz", **answers)
imported = [name for name in sys.modules if name.startswith("torch.")]
print(type(model).__name__, model.ladder, imported)
"""

SERVE = """
import asyncio, json
import numpy as np
from freezer.pyfunc import _load_pyfunc
image, scale = np.ones((2, 3, 8, 8), "float32"), np.ones((2, 1), "float32")
answer = _load_pyfunc(sys.argv[1]).predict({"image": image, "scale": scale})
from freezer.store import Store
from infra.serving.model_server import ModelServer, ServingOptions
server = ModelServer(ServingOptions(model="mixed", store=sys.argv[2]))
server.refresh()
async def chunks():
    yield json.dumps({"image": image.tolist(), "scale": scale.tolist()}).encode()
response = asyncio.run(server.answer(chunks(), "application/json"))
print(response.status_code, np.allclose(json.loads(response.body)["brief"], answer["brief"]))
"""

COMMAND = "from freezer.cli import main\nsys.argv[0] = 'coldpress'\nmain()"


class Mixed(nn.Module):
    """Outputs of several dtypes and layouts, one without elements, and an input of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image: Tensor, scale: Tensor) -> dict[str, Tensor]:
        maps = self.conv(image).relu() * scale.float()[:, :, None, None]
        return {
            "maps": maps.permute(0, 2, 3, 1),
            "brief": maps.mean((2, 3)).bfloat16(),
            "half": maps.amax((2, 3)).half(),
            "count": (image > 0).sum((1, 2, 3)),
            "empty": image[:0],
        }


def given(batch: int) -> dict[str, Tensor]:
    scale = torch.linspace(0.5, 2.0, batch)[:, None].bfloat16()
    return {"image": random_inputs(batch, 3, 8, 8), "scale": scale}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Artifacts of ONNX Runtime and OpenVINO for batch 1 to 4; read-only."""
    folder, dims = tmp_path_factory.mktemp("engines"), {"image": {0: BATCH}, "scale": {0: BATCH}}
    made = {}
    with pytest.MonkeyPatch.context() as patched:
        steps = [step for step in other_payloads.STEPS if step is not with_captured]
        patched.setattr(other_payloads, "STEPS", steps)  # of so small a model it may be faster
        for recipe in ("onnxruntime", "openvino"):
            pytest.importorskip(recipe)
            result = quickly(seeded(Mixed), given(2), folder / recipe, recipe, dims=dims)
            made[recipe] = artifact_of(result)
    return made


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find no torch."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_answer_as_with_torch(
    engines: dict[str, Artifact], engine: str, tmp_path: Path
) -> None:
    folder = engines[engine].folder
    for batch in (1, 2, 4):
        arrays = {name: tensor.float().numpy() for name, tensor in given(batch).items()}
        np.savez(tmp_path / f"{batch}.npz", **arrays)  # type: ignore[arg-type]
    assert python(BLOCK + CALL, folder, tmp_path) == "ArrayModel () []\n"
    answers = np.load(tmp_path / "answers.npz")
    model = freezer.load(folder)
    for name in answers.files:
        batch, _, output = name.split("/")
        expected = model(**given(int(batch)))[output]
        wide = expected.float() if expected.dtype is torch.bfloat16 else expected
        assert answers[name].dtype == wide.numpy().dtype, name
        np.testing.assert_allclose(answers[name], wide.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_commands_need_no_torch(engines: dict[str, Artifact], tmp_path: Path) -> None:
    store, folder = Store.open(str(tmp_path / "store"), create=True), tmp_path / "pulled"
    store.publish("mixed", source_key="key", artifacts=[engines["onnxruntime"]])
    for words in (
        ["pull", "mixed", "--store", store.root, "--dest", folder],
        ["verify", folder],
        ["inspect", folder],
        ["--version"],
    ):
        python(BLOCK + COMMAND, *words)
    save_file(given(2), tmp_path / "in.safetensors")
    files = ["--input", tmp_path / "in.safetensors", "--output", tmp_path / "out.safetensors"]
    assert "brief: bfloat16 [2, 4]" in python(BLOCK + COMMAND, "run", folder, *files)
    answers, expected = load_file(tmp_path / "out.safetensors"), freezer.load(folder)(**given(2))
    for name, tensor in expected.items():
        torch.testing.assert_close(answers[name], tensor)


def test_pyfunc_and_service_need_no_torch(engines: dict[str, Artifact], tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mixed", source_key="key", artifacts=[engines["onnxruntime"]])
    assert python(BLOCK + SERVE, engines["onnxruntime"].folder, store.uri) == "200 True\n"


@pytest.mark.parametrize("words", [["freeze", "x.py:model", "--out", "x"], ["explain", "x"]])
def test_freezing_names_the_command(words: list[str]) -> None:
    done = finished(sys.executable, "-c", BLOCK + COMMAND, *words)
    assert done.returncode == USAGE, done.stderr
    assert install_command("torch") in done.stderr


def ladder(reference: object, **options: Any) -> tuple[Refusal, ...]:
    with pytest.raises(IncompatibleError) as caught:
        freezer.load(str(reference), **options)
    return caught.value.ladder


@pytest.mark.usefixtures("no_torch")
def test_torchs_payloads_name_the_command(
    scripted: Frozen, portable: Frozen, inductor: Frozen
) -> None:
    for frozen in (scripted, portable, inductor):
        manifest = frozen.artifact.manifest
        (refusal,) = ladder(frozen.artifact.folder)
        assert (refusal.reason, refusal.got) == ("runtime_missing", "torch not installed")
        assert install_command("torch", torch=manifest.needs.torch) in refusal.expected
        assert manifest.payloads[0].kind in refusal.expected


@pytest.mark.usefixtures("no_torch")
def test_tensors_and_gpus_need_torch(engines: dict[str, Artifact]) -> None:
    folder = engines["onnxruntime"].folder
    for options in (LoadOptions(arrays="torch"), LoadOptions(device="cuda:0")):
        with pytest.raises(MissingDependencyError):
            freezer.load(folder, options)
    for keywords in ({"speed": True}, {"samples": "file"}):
        with pytest.raises(MissingDependencyError):
            freezer.verify(folder, **keywords)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_what_others_changed_is_refused(
    engines: dict[str, Artifact],
    engine: str,
    portable: Frozen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next artifact of the ladder needs torch; nothing serves."""
    flipped = copy_of(engines[engine], tmp_path / "flipped")
    flip_a_byte(flipped.folder / flipped.manifest.payloads[0].path)
    changed = with_golden(engines[engine], tmp_path / "changed", lambda y: y + 1)
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mixed", source_key="key", artifacts=[changed, portable.artifact])
    _, public = make_pair(tmp_path, "own")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [refusal.reason for refusal in ladder(flipped.folder)] == ["tampered"]
    assert [refusal.reason for refusal in ladder(changed.folder)] == ["canary"]
    (refusal,) = ladder(engines[engine].folder, trusted_keys=[public])
    assert refusal.reason == "unsigned"
    reasons = [refusal.reason for refusal in ladder("mixed", store=store.uri)]
    assert reasons == ["canary", "runtime_missing"]


def test_captured_payloads_are_left_out(engines: dict[str, Artifact], tmp_path: Path) -> None:
    """Sizes that the captured program would serve faster are served by the engine."""
    made = engines["onnxruntime"]
    (payload, *_) = made.manifest.payloads
    captured = replace(payload, path="payloads/captured.pt2", kind="exported")
    both = copy_of(made, tmp_path / "both", payloads=(captured, *made.manifest.payloads))
    assert freezer.load(both.folder, arrays="numpy").payload_for({"batch": 2}).kind == "onnxruntime"
    assert [refusal.reason for refusal in ladder(both.folder)] == ["tampered"], "it is missing"


def test_inputs_of_bfloat16_must_be_exact(engines: dict[str, Artifact]) -> None:
    image, scale = np.ones((1, 3, 8, 8), np.float32), np.full((1, 1), 1.5, np.float32)
    for arrays in ("numpy", "torch"):
        model = freezer.load(engines["openvino"].folder, arrays=arrays)
        tensor = torch.from_numpy(scale).bfloat16()
        expected = np.asarray(model(image, tensor)["count"])
        for value in (scale, np.float32(1.5).reshape(1, 1), torch.from_numpy(scale).bfloat16()):
            np.testing.assert_array_equal(np.asarray(model(image, value)["count"]), expected)
        with pytest.raises(ContractError, match="'scale'"):
            model(image, np.full((1, 1), 1.1, np.float32))


def test_torchs_payloads_return_arrays(scripted: Frozen, portable: Frozen) -> None:
    x = random_inputs(2, 4)
    for frozen in (scripted, portable):
        model = freezer.load(frozen.artifact.folder, arrays="numpy")
        answer = model(x.numpy())
        assert type(answer) is np.ndarray
        np.testing.assert_array_equal(answer, freezer.load(frozen.artifact.folder)(x).numpy())


def test_a_stream_keeps_its_state(tmp_path: Path) -> None:
    made = artifact_of(
        quickly(seeded(InPlace), {"x": random_inputs(2, 4)}, tmp_path / "made", reset="reset")
    )
    model, x = freezer.load(made.folder, arrays="numpy"), np.ones((2, 4), np.float32)
    first, second = model(x), model(x)
    assert not np.allclose(first, second)
    model.preserved["reset"]()
    np.testing.assert_array_equal(model(x), first)


def test_names_of_earlier_releases(engines: dict[str, Artifact]) -> None:
    folder = engines["onnxruntime"].folder
    assert type(freezer.load(folder, runtime="native")).__name__ == "ArrayModel"
    for options in (
        {"arrays": "jax"},
        {"runtime": "java"},
        {"runtime": "native", "arrays": "torch"},
        {"runtime": "native", "device": "cuda:0"},
    ):
        with pytest.raises(UsageError):
            freezer.load(folder, **options)  # type: ignore[call-overload]
