"""Weights of ONNX Runtime and OpenVINO, which are files of their own beside the payload."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import freezer
from freezer.artifact import MANIFEST, Artifact, FileRef
from freezer.codec import encode
from freezer.errors import IncompatibleError
from freezer.files import digest_file, verify_file
from freezer.pyfunc import STORE_POINTER, StorePointer, _load_pyfunc
from freezer.runtime.native import CALLS_FILE, ENGINE_OPENERS
from freezer.store import Store
from tests.support.keys import make_pair
from tests.support.steps import HERE, artifact_of, blob_of, flip_a_byte, quickly, random_inputs

IMAGE = random_inputs(2, 3, 8, 8)


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A convolution; read-only."""
    pytest.importorskip(request.param)
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp(request.param) / "conv"
    return artifact_of(quickly(nn.Conv2d(3, 16, 3), {"input": IMAGE}, out, request.param))


def weights_of(artifact: Artifact) -> FileRef:
    """The only weights of an artifact."""
    [payload] = artifact.manifest.payloads
    assert payload.weights is not None
    return payload.weights


def answer(folder: Path, **options: Any) -> Any:
    """The answer of an artifact, without torch's tensors."""
    return freezer.load(folder, arrays="numpy", **options)(IMAGE)


def test_names_are_digests(artifact: Artifact) -> None:
    weights = weights_of(artifact)
    assert weights.digest == digest_file(artifact.folder / weights.path)
    assert f"sha256:{Path(weights.path).name}" == weights.digest
    assert weights in artifact.manifest.contents


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink])
@pytest.mark.parametrize("signed", [False, True])
def test_damage_is_named(
    artifact: Artifact, damage: Callable[[Path], None], signed: bool, tmp_path: Path
) -> None:
    """Whatever the engine says of it."""
    private, public = make_pair(tmp_path, "own")
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("conv", source_key="a", artifacts=[artifact])
    store.sign(store.version("conv"), HERE, private)
    path = blob_of(store.root / "conv", weights_of(artifact).digest)
    damage(path)
    with pytest.raises(IncompatibleError, match=path.name) as caught:
        freezer.load("conv", store=store.uri, trusted_keys=[public] if signed else [])
    assert [refusal.reason for refusal in caught.value.ladder] == ["tampered"]


class Picks(nn.Module):
    """[batch, 4, 64] to [batch, 2, 64], by indices and shapes that are weights."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor([3, 1]))
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.places].reshape(-1, 2, 64) * self.scale


def test_shapes_of_openvino_come_from_the_archive(tmp_path: Path) -> None:
    """It reads weights while they are verified, and a wrong index ends the process."""
    pytest.importorskip("openvino")
    model, x = Picks(), random_inputs(2, 4, 64)
    artifact = artifact_of(quickly(model, {"x": x}, tmp_path / "picks", "openvino"))
    [payload] = artifact.manifest.payloads
    with zipfile.ZipFile(artifact.folder / payload.path) as archive:
        places = json.loads(archive.read(CALLS_FILE))["shaping"]
    file = artifact.folder / weights_of(artifact).path
    data = bytearray(file.read_bytes())
    for offset, size in places:
        data[offset : offset + size] = b"\x7f" * size
    assert bytes(data) != file.read_bytes()
    file.write_bytes(data)
    opened = ENGINE_OPENERS[payload.kind]
    runner = opened(artifact.folder / payload.path, artifact.manifest.recipe.settings, 1)
    torch.testing.assert_close(torch.from_numpy(runner([x.numpy()])[0]), model(x).detach())
    with pytest.raises(IncompatibleError, match="tampered"):
        freezer.load(artifact.folder)


def test_a_person_stops_a_load_of_damaged_weights(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "copy"
    shutil.copytree(artifact.folder, folder)
    flip_a_byte(folder / weights_of(artifact).path)
    monkeypatch.setattr("freezer.serving.opening.open_arrays", stopped)
    with pytest.raises(KeyboardInterrupt):
        answer(folder)


def test_what_cannot_be_verified_is_refused(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(path: Path, **kwargs: Any) -> None:
        if path.name == Path(weights_of(artifact).path).name:
            raise MemoryError
        verify_file(path, **kwargs)

    monkeypatch.setattr("freezer.artifact.folder.verify_file", verify)
    with pytest.raises(IncompatibleError, match="MemoryError"):
        answer(artifact.folder)


def test_artifacts_that_stay_in_their_store_serve(artifact: Artifact, tmp_path: Path) -> None:
    """MLflow has the manifest and a pointer."""
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("conv", source_key="a", artifacts=[artifact])
    pointer = StorePointer(store=store.uri, model="conv", version=1, device_class=HERE)
    folder = tmp_path / "registered"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(artifact.manifest.to_bytes())
    (folder / STORE_POINTER).write_text(json.dumps(encode(pointer)))
    answered = _load_pyfunc(str(folder)).predict({"input": IMAGE.numpy()})
    np.testing.assert_array_equal(answered, answer(artifact.folder))


def test_links_to_files_of_other_names_serve(artifact: Artifact, tmp_path: Path) -> None:
    """Volumes and caches keep files under names of their own."""
    for number, file in enumerate(artifact.folder.rglob("*")):
        if file.is_file():
            link = tmp_path / "linked" / file.relative_to(artifact.folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tmp_path / str(number))
            link.symlink_to(tmp_path / str(number))
    np.testing.assert_array_equal(answer(tmp_path / "linked"), answer(artifact.folder))


def test_payloads_of_earlier_releases_have_their_weights_within(
    artifact: Artifact, tmp_path: Path
) -> None:
    [payload] = artifact.manifest.payloads
    path, weights = artifact.folder / payload.path, artifact.folder / weights_of(artifact).path
    old = tmp_path / path.name
    if payload.kind == "onnxruntime":
        import onnx

        onnx.save(onnx.load(str(path)), str(old))
    else:
        with zipfile.ZipFile(path) as new, zipfile.ZipFile(old, "w") as archive:
            archive.write(weights, "model.bin")
            for name in new.namelist():
                archive.writestr(name, new.read(name).replace(weights.name.encode(), b""))
    opened = ENGINE_OPENERS[payload.kind]
    settings = artifact.manifest.recipe.settings
    first, second = (opened(file, settings, 1)([IMAGE.numpy()])[0] for file in (old, path))
    np.testing.assert_array_equal(first, second)
