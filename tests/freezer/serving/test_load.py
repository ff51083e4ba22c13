"""load: selection down to portable, refusals, damage, folders and references."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact, Fallback, Manifest, PayloadKind
from freezer.errors import IncompatibleError, UsageError, install_command
from freezer.files import verify_file
from freezer.hardware import detect
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.keys import make_pair
from tests.support.models import mlp
from tests.support.steps import (
    HERE,
    blob_of,
    copy_of,
    flip_a_byte,
    python,
    random_inputs,
    rewritten,
)

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
X = random_inputs(2, 4)
THREADS = torch.get_num_threads()

needs_v4 = pytest.mark.skipif(V4 not in detect().classes, reason="this process has no x86-64-v4")


def blob(store: Store, digest: str) -> Path:
    return blob_of(store.root / "mlp", digest)


def manifest_here(store: Store) -> Manifest:
    return store.manifest(store.version("mlp"), HERE)


def packed(artifact: Artifact, folder: Path, device_class: str) -> Artifact:
    """A copy whose manifest says that its payloads were packed for a class and a thread count."""
    copied = copy_of(artifact, folder)
    payloads = tuple(
        replace(payload, num_threads=THREADS, layouts=None)
        for payload in artifact.manifest.payloads
    )
    return rewritten(copied, device_class=device_class, payloads=payloads)


def store_of(folder: Path, artifacts: Mapping[str, Artifact]) -> Store:
    store = Store.open(str(folder / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts=list(artifacts.values()))
    return store


def test_the_requested_class_serves(published: Store) -> None:
    model = freezer.load("mlp:1", store=f"file://{published.root}", device_class="portable")
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    with pytest.raises(IncompatibleError) as caught:
        freezer.load("mlp", store=str(published.root), device_class="cuda-sm75")
    assert [refusal.reason for refusal in caught.value.ladder] == ["class_mismatch"]
    for wrong in ({"device_class": "none"}, {"threads": 0}):
        with pytest.raises(UsageError):
            freezer.load("mlp", store=str(published.root), **wrong)


def payload_blob(store: Store, device_class: str = HERE) -> Path:
    return blob(store, store.manifest(store.version("mlp"), device_class).payloads[0].digest)


def flipped_payload(store: Store) -> None:
    flip_a_byte(payload_blob(store))


def missing_payload(store: Store) -> None:
    payload_blob(store).unlink()


def flipped_payloads(store: Store) -> None:
    flip_a_byte(payload_blob(store))
    flip_a_byte(payload_blob(store, "portable"))


def flipped_golden(store: Store) -> None:
    files = {item.path: item.digest for item in manifest_here(store).files}
    flip_a_byte(blob(store, files["golden/outputs.safetensors"]))


def flipped_image(store: Store) -> None:
    flip_a_byte(blob(store, store.version("mlp").images[HERE].digest))


def flipped_manifest(store: Store) -> None:
    image = json.loads(blob(store, store.version("mlp").images[HERE].digest).read_bytes())
    flip_a_byte(blob(store, image["config"]["digest"]))


@pytest.mark.parametrize(
    "damage", [flipped_payload, missing_payload, flipped_image, flipped_manifest]
)
def test_a_damaged_artifact_falls_back_to_the_next(
    store: Store, damage: Callable[[Store], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(store)
    model = freezer.load("mlp", store=str(store.root))
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    assert [(refusal.rung, refusal.reason) for refusal in model.ladder] == [(HERE, "tampered")]
    assert f"refused: {HERE}: tampered" in caplog.text
    torch.testing.assert_close(model(X), mlp()(X))
    with pytest.raises(IncompatibleError) as caught:
        freezer.load("mlp", store=str(store.root), strict=True)
    assert len(caught.value.ladder) == 1


@pytest.mark.parametrize("damage", [flipped_payloads, flipped_golden])
def test_the_error_has_every_refusal(store: Store, damage: Callable[[Store], None]) -> None:
    damage(store)
    with pytest.raises(IncompatibleError) as caught:
        freezer.load("mlp", store=str(store.root))
    assert [refusal.rung for refusal in caught.value.ladder] == [HERE, "portable"]


def needing(engine: PayloadKind, scripted: Artifact, other: Artifact, folder: Path) -> Artifact:
    """An artifact whose payloads are said to need an engine, with the payload of another artifact
    as its fallback.
    """
    copied = copy_of(scripted, folder)
    (payload,) = other.manifest.payloads
    alone = replace(payload, path="payloads/torch.pt2")
    shutil.copyfile(other.folder / payload.path, folder / alone.path)
    fallback = Fallback(recipe=other.manifest.recipe, payloads=(alone,), speedup=1.25)
    payloads = tuple(replace(item, kind=engine) for item in scripted.manifest.payloads)
    return rewritten(copied, payloads=payloads, fallback=fallback)


def test_the_fallback_serves_without_the_engine(
    scripted: Frozen,
    portable: Frozen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("freezer.serving.load.find_spec", lambda name: None)
    latency = scripted.artifact.manifest.latency
    assert latency is not None
    latency = replace(latency, speedup=2.5, points=())
    fast = copy_of(scripted.artifact, tmp_path / "s", latency=latency)
    both = needing("onnxruntime", fast, portable.artifact, tmp_path / "both")
    store = store_of(tmp_path, {HERE: both, "portable": portable.artifact})
    model: Any = freezer.load("mlp", store=str(store.root))
    assert [(item.rung, item.reason) for item in model.ladder] == [(HERE, "runtime_missing")]
    assert (model.manifest.device_class, model.manifest.recipe.name) == (HERE, "portable")
    assert "take 2.0 times as long" in caplog.text
    assert install_command("onnxruntime") in caplog.text
    torch.testing.assert_close(model(X), mlp()(X))
    with pytest.raises(IncompatibleError):
        freezer.load("mlp", store=str(store.root), strict=True)
    found = freezer.verify("mlp", store=str(store.root))
    assert (found.device_class, found.ladder) == (HERE, model.ladder)


# Limits of the instruction set


LOAD = """
import os, sys, torch, freezer
model = freezer.load(sys.argv[1], threads=int(sys.argv[2]), limit_isa=len(sys.argv) > 3)
print(model.manifest.device_class, len(model.ladder), os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


@needs_v4
@pytest.mark.parametrize(
    ("environ", "arguments"), [({"ONEDNN_MAX_CPU_ISA": "AVX2"}, ()), ({}, ("limit",))]
)
def test_weights_packed_for_v3_serve_under_its_limit(
    environ: dict[str, str], arguments: tuple[str, ...], scripted: Frozen, tmp_path: Path
) -> None:
    lesser = packed(scripted.artifact, tmp_path / "v3", V3)
    found = python(LOAD, lesser.folder, THREADS, *arguments, env={**os.environ, **environ})
    assert found.split() == [V3, "0", "AVX2"]


# Folders and references


def test_a_folder_is_loaded_by_path(
    scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy_of(scripted.artifact, tmp_path / "mlp")
    monkeypatch.chdir(tmp_path)
    for reference in (copied.folder, str(copied.folder), "mlp", Path("mlp")):
        torch.testing.assert_close(freezer.load(reference)(X), mlp()(X))
    with pytest.raises(IncompatibleError):
        freezer.load("mlp", device_class="portable")


def test_inductor_payloads_need_no_compiler(inductor: Frozen, tmp_path: Path) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    code = """
import sys, torch, freezer
model = freezer.load(sys.argv[1], threads=int(sys.argv[2]))
for batch in (1, 3):
    print(tuple(model(torch.ones(batch, 3, 16, 16)).shape))
compilers = ("torch._inductor.codecache", "torch._inductor.compile_fx")
print([name for name in sys.modules if name.startswith(compilers)])
"""
    env = {
        "PATH": "/nonexistent",
        "HOME": "/nonexistent",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TMPDIR": str(scratch),
    }
    compiled = tuple(
        payload for payload in inductor.artifact.manifest.payloads if payload.kind == "inductor"
    )
    artifact = copy_of(
        inductor.artifact, tmp_path / "compiled", payloads=compiled
    )  # a busy machine may add the captured program
    assert python(code, artifact.folder, THREADS, env=env).splitlines() == [
        "(1, 10)",
        "(3, 10)",
        "[]",
    ]
    assert list(cache.iterdir()) == []


def test_a_model_is_freed_with_its_last_reference(scripted: Frozen) -> None:
    """A process that changes to a new version would else hold both."""

    def loaded() -> weakref.ref[Any]:
        return weakref.ref(freezer.load(scripted.artifact.folder))

    loaded()  # imports may leave cycles
    gc.collect()
    gc.disable()
    try:
        assert loaded()() is None
    finally:
        gc.enable()


def exchanged(path: Path) -> None:
    """Put another file in the place of one."""
    other = path.with_name(f"{path.name}-other")
    other.write_bytes(b"another file")
    other.replace(path)


def overwritten(path: Path) -> None:
    """Write other bytes into a file."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"other bytes")


@pytest.mark.parametrize("which", ["store", "folder"])
@pytest.mark.parametrize("attack", [exchanged, overwritten])
@pytest.mark.parametrize("step", range(3))
def test_what_is_verified_is_what_is_opened(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    attack: Callable[[Path], None],
    step: int,
) -> None:
    """All files change right after the first, second or third file was verified, while
    `load` runs.
    """
    private, public = make_pair(tmp_path, "own")
    version = store.version("mlp")
    store.sign(version, HERE, private)
    folder = store.pull(version, HERE, tmp_path / "pulled").folder
    places = {}
    for item in manifest_here(store).contents:
        if item.path.startswith(("payloads/", "golden/")):
            place = blob(store, item.digest) if which == "store" else folder / item.path
            places[Path(item.path).name] = place
    verified = []

    def verify_and_attack(path: Path, **kwargs: Any) -> None:
        verify_file(path, **kwargs)
        verified.append(path.name)
        if len(verified) == step + 1:
            for name in verified:
                attack(places[name])

    monkeypatch.setattr("freezer.artifact.folder.verify_file", verify_and_attack)
    model = freezer.load(
        "mlp" if which == "store" else folder,
        store=str(store.root),
        device_class=HERE,
        trusted_keys=[public] if attack is overwritten else [],
    )
    assert sorted(verified) == sorted(places)
    assert len(places) == 3
    torch.testing.assert_close(model(X), mlp()(X))
