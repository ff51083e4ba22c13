"""Model repositories of Triton: the payloads under the names that Triton's backends give them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.artifact.triton import write_triton
from freezer.errors import UsageError
from freezer.runtime.tensor_files import load_tensors
from freezer.spec import Dim
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.commands import output
from tests.support.raylets import ROOT
from tests.support.steps import BATCH, HERE, artifact_of, copy_of, quickly, random_inputs

SEQ = Dim(name="seq", min=2, max=6)

CLIENT_PYTHON = os.environ.get("COLDPRESS_TRITON_CLIENT", "")
"""An interpreter with tritonclient[grpc], which has the schema of config.pbtxt."""


class Weighted(nn.Module):
    """Two inputs of different dtypes and shapes, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 80)

    def forward(self, ids: Tensor, values: Tensor) -> dict[str, Tensor]:
        weights = ids.to(torch.float32).mean(1, keepdim=True)
        return {"scores": self.linear(values) * weights, "total": values.sum(1)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    """An artifact of a recipe; read-only."""
    known: dict[str, Artifact] = {}

    def freeze(recipe: str) -> Artifact:
        if recipe not in known:
            out = tmp_path_factory.mktemp("triton") / "weighted"
            inputs = {"ids": torch.randint(1, 9, (2, 3)), "values": random_inputs(2, 4)}
            dims = {"ids": {0: BATCH, 1: SEQ}, "values": {0: BATCH}}
            result = quickly(Weighted(), inputs, out, recipe, dims=dims, name="weighted")
            known[recipe] = artifact_of(result)
        return known[recipe]

    return freeze


def ports(config: Path, side: str) -> list[tuple[str, str, list[int]]]:
    """Name, type and dims of the inputs or outputs of a config.pbtxt."""
    text = config.read_text()
    fields = r"name: (\".*\")\s+data_type: (\w+)\s+dims: (\[.*\])"
    found = re.findall(rf"^{side} \[ \{{.*\s+{fields}", text, re.MULTILINE)
    return [(json.loads(name), kind, json.loads(dims)) for name, kind, dims in found]


def golden(artifact: Artifact, index: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and outputs of a golden set, by the names of the contract."""
    sides = []
    for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS):
        stored = load_tensors(artifact.folder / path)
        names = [name.split("/", 1) for name in stored]
        sides.append({name: stored[f"{i}/{name}"] for i, name in names if i == str(index)})
    return sides[0], sides[1]


def check_answers(artifact: Artifact, config: Path, answers: list[Any]) -> None:
    """Compare the outputs in the order of config.pbtxt with the golden ones, and the dims."""
    _, outputs = golden(artifact)
    for spec, answer, (_, kind, dims) in zip(
        artifact.manifest.outputs, answers, ports(config, "output"), strict=True
    ):
        array = np.asarray(answer)
        np.testing.assert_allclose(array, outputs[spec.name].numpy(), rtol=1e-4, atol=1e-5)
        assert kind == "TYPE_FP32"
        assert all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))


def feeds_of(artifact: Artifact, config: Path) -> dict[str, Any]:
    """The golden inputs by the names in config.pbtxt, whose order is the contract's."""
    inputs, _ = golden(artifact)
    feeds = {}
    for spec, (name, kind, dims) in zip(
        artifact.manifest.inputs.tensors, ports(config, "input"), strict=True
    ):
        assert kind == {"int64": "TYPE_INT64", "float32": "TYPE_FP32"}[spec.dtype]
        assert dims == [size if isinstance(size, int) else -1 for size in spec.shape]
        feeds[name] = inputs[spec.name].numpy()
    return feeds


def test_onnx_files_answer_by_the_names(made: Callable[[str], Artifact], tmp_path: Path) -> None:
    runtime, artifact = pytest.importorskip("onnxruntime"), made("onnxruntime")
    config = write_triton(artifact, tmp_path)
    file = tmp_path / "weighted" / "1" / "model.onnx"
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [name for name, _, _ in ports(config, "output")]
    check_answers(artifact, config, session.run(names, feeds_of(artifact, config)))
    text = config.read_text()
    assert 'backend: "onnxruntime"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 0\n' in text
    count = torch.get_num_threads()  # with which it was judged
    assert f'key: "intra_op_thread_count" value: {{ string_value: "{count}" }}' in text
    assert "count: 1 kind: KIND_CPU" in text


def test_openvino_graphs_answer_as_the_backend_opens_them(
    made: Callable[[str], Artifact], tmp_path: Path
) -> None:
    """The backend sets the sizes of config.pbtxt, by RESHAPE_IO_LAYERS: it takes no ranges."""
    openvino, artifact = pytest.importorskip("openvino"), made("openvino")
    config = write_triton(artifact, tmp_path)
    model = openvino.Core().read_model(str(tmp_path / "weighted" / "1" / "model.xml"))
    steps = openvino.preprocess.PrePostProcessor(model)
    for name, _, dims in ports(config, "input"):
        steps.input(name).tensor().set_shape(openvino.PartialShape(dims))
    reshaped = steps.build()
    for (name, _, dims), port in zip(ports(config, "output"), reshaped.outputs, strict=True):
        assert name == min(port.names)
        for dim, size in zip(dims, port.partial_shape, strict=True):
            assert size.is_dynamic or size.get_length() == dim
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # which the backend does not set
    answers = openvino.Core().compile_model(reshaped, "CPU", exact)(feeds_of(artifact, config))
    names = [name for name, _, _ in ports(config, "output")]
    check_answers(artifact, config, [answers[name] for name in names])
    text = config.read_text()
    assert 'backend: "openvino"\nplatform: ""\nmax_batch_size: 0\n' in text
    assert 'key: "RESHAPE_IO_LAYERS" value: { string_value: "YES" }' in text
    assert "# This backend computes in bfloat16" in text


@pytest.mark.slow
@pytest.mark.parametrize("beside_above_mb", [0, 1000])
def test_inductor_packages_open_with_torchs_own_loader(
    beside_above_mb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the backend does, which knows no table of weights; with weights in the library and beside
    it.
    """
    from freezer.freezing import recipes

    settings = recipes.RECIPES["inductor-frozen"].settings
    changed = {**settings, "weights_beside_above_mb": beside_above_mb}
    recipe = replace(recipes.RECIPES["inductor-frozen"], settings=changed)
    monkeypatch.setattr(recipes, "RECIPES", {**recipes.RECIPES, recipe.name: recipe})
    inputs = {"ids": torch.randint(1, 9, (2, 3)), "values": random_inputs(2, 4)}
    dims = {"ids": {0: BATCH, 1: SEQ}, "values": {0: BATCH}}
    artifact = artifact_of(
        quickly(Weighted(), inputs, tmp_path / "frozen", recipe.name, dims=dims, name="weighted")
    )
    config = write_triton(artifact, tmp_path / "repository")
    file = config.parent / "1" / "model.pt2"
    loader = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
    given, _ = golden(artifact)
    answers = loader.run([given[spec.name] for spec in artifact.manifest.inputs.tensors])
    check_answers(artifact, config, answers)
    assert [name for name, _, _ in ports(config, "input")] == ["INPUT__0", "INPUT__1"]
    assert [name for name, _, _ in ports(config, "output")] == ["OUTPUT__0", "OUTPUT__1"]
    assert 'backend: "pytorch"\nplatform: "torch_aoti"\n' in config.read_text()
    with pytest.raises(UsageError):  # its weights are packed for a thread count
        write_triton(artifact, tmp_path / "other", threads=77)


def test_batches_are_along_a_first_dim_of_all(
    made: Callable[[str], Artifact], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    config = write_triton(made("onnxruntime"), tmp_path, batch=True)
    assert [dims for _, _, dims in ports(config, "input")] == [[-1], [4]]
    assert [dims for _, _, dims in ports(config, "output")] == [[80], [1]]
    text = config.read_text()
    assert ("max_batch_size: 4\n" in text, "dynamic_batching { }\n" in text) == (True, True)
    assert text.count("reshape: { shape: [ ] }") == 1, "`total` has one value in a request"


def test_what_triton_cannot_serve_is_refused(
    made: Callable[[str], Artifact], portable: Frozen, scripted: Frozen, tmp_path: Path
) -> None:
    """Nothing is written."""
    pytest.importorskip("onnxruntime")
    artifact = made("onnxruntime")
    manifest = artifact.manifest
    outputs = tuple(replace(item, dtype="complex64") for item in manifest.outputs)
    refused: list[tuple[Artifact, dict[str, Any]]] = [
        (portable.artifact, {}),
        (scripted.artifact, {}),
        (replace(artifact, manifest=replace(manifest, outputs=outputs)), {}),
    ]
    for given, options in refused:
        with pytest.raises(UsageError):
            write_triton(given, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    write_triton(artifact, tmp_path)
    with pytest.raises(UsageError):
        write_triton(artifact, tmp_path)
    assert (tmp_path / "weighted" / "config.pbtxt").exists()


def test_outputs_in_another_order_of_dims_are_refused(tmp_path: Path) -> None:
    """A convnet's feature maps are stored with channels last."""
    pytest.importorskip("onnxruntime")
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model = model.to(memory_format=torch.channels_last)
    inputs = {"input": random_inputs(1, 3, 8, 8).to(memory_format=torch.channels_last)}
    artifact = artifact_of(quickly(model, inputs, tmp_path / "out", "onnxruntime", name="conv"))
    with pytest.raises(UsageError):
        write_triton(artifact, tmp_path / "repository")
    assert not (tmp_path / "repository" / "conv").exists()


@pytest.mark.slow
@pytest.mark.skipif(not CLIENT_PYTHON, reason="COLDPRESS_TRITON_CLIENT names no interpreter")
@pytest.mark.parametrize("recipe", ["onnxruntime", "openvino", "inductor-frozen"])
def test_configurations_are_of_tritons_schema(
    made: Callable[[str], Artifact], recipe: str, tmp_path: Path
) -> None:
    """Parsed by protobuf; an unknown field or value is an error."""
    artifact = made(recipe)
    for batch in (False, True) if recipe == "onnxruntime" else (False,):
        config = write_triton(artifact, tmp_path / str(batch), batch=batch)
        script = ROOT / "tests" / "support" / "triton_config.py"
        parsed = json.loads(output(CLIENT_PYTHON, script, config))
        assert parsed["name"] == "weighted"
        for side in ("input", "output"):
            found = [
                (item["name"], item["data_type"], [int(dim) for dim in item["dims"]])
                for item in parsed[side]
            ]
            assert found == ports(config, side)


def test_command_exports_from_a_store(
    made: Callable[[str], Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The version's number is the folder's."""
    pytest.importorskip("onnxruntime")
    from freezer.cli import main

    store = Store.open(str(tmp_path / "store"), create=True)
    artifact = made("onnxruntime")
    store.publish("weighted", source_key="a", artifacts=[artifact])
    other = copy_of(artifact, tmp_path / "other", verdict="kept-eager")
    store.publish("weighted", source_key="b", artifacts=[other])
    words = ["export", "weighted", str(tmp_path / "out"), "--as", "triton", "--store", store.uri]
    monkeypatch.setattr("sys.argv", ["coldpress", *words, "--device-class", HERE])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    folder = tmp_path / "out" / "weighted"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "config.pbtxt"]
    assert (folder / "config.pbtxt").read_text() in capsys.readouterr().out
