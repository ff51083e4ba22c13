"""Loading: the ladder from the most specific rung to portable, what refuses one, and that no compiler is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import freezer
from freezer.artifact.folder import Artifact
from freezer.artifact.manifest import Manifest
from freezer.artifact.sections import Needs
from freezer.errors import IncompatibleError, NotPublishedError, StoreUnreachableError, UsageError
from freezer.hardware.machine import detect
from freezer.store.store import Store
from tests.conftest import Frozen
from tests.models import mlp
from tests.steps import HERE, copy_of, flip_a_byte, python, random_inputs, rewritten

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
X = random_inputs(2, 4)
THREADS = torch.get_num_threads()

needs_v4 = pytest.mark.skipif(V4 not in detect().classes, reason="this process has no x86-64-v4")


def blob(store: Store, digest: str) -> Path:
    return store.root / "mlp" / "blobs" / "sha256" / digest.removeprefix("sha256:")


def manifest_here(store: Store) -> Manifest:
    return store.manifest(store.version("mlp"), HERE)


def packed(artifact: Artifact, folder: Path, device_class: str, num_threads: int = THREADS) -> Artifact:
    """The artifact as if its payloads were packed for a class and a thread count."""
    copied = copy_of(artifact, folder)
    payloads = tuple(
        type(p)(path=p.path, digest=p.digest, size_bytes=p.size_bytes, kind=p.kind, num_threads=num_threads, dims=p.dims)
        for p in artifact.manifest.payloads
    )
    return rewritten(copied, device_class=device_class, payloads=payloads)


# The rungs


def test_the_most_specific_class_serves(published: Store) -> None:
    model = freezer.load("mlp", store=str(published.root))
    assert model.manifest is not None
    assert model.manifest.device_class == HERE
    assert model.manifest.version == 1
    assert model.ladder == ()
    torch.testing.assert_close(model(X), mlp()(X))


def test_one_class_may_be_asked_for(published: Store) -> None:
    model = freezer.load("mlp:1", store=f"file://{published.root}", device_class="portable")
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    with pytest.raises(IncompatibleError, match="cuda-sm75: class_mismatch: got only") as caught:
        freezer.load("mlp", store=str(published.root), device_class="cuda-sm75")
    assert [refusal.reason for refusal in caught.value.ladder] == ["class_mismatch"]
    with pytest.raises(UsageError, match="unknown device class 'none'"):
        freezer.load("mlp", store=str(published.root), device_class="none")


def flipped_payload(store: Store) -> None:
    flip_a_byte(blob(store, manifest_here(store).payloads[0].digest))


def flipped_golden_of_both(store: Store) -> None:
    flip_a_byte(blob(store, next(f.digest for f in manifest_here(store).files if f.path == "golden/outputs.safetensors")))


def missing_payload(store: Store) -> None:
    blob(store, manifest_here(store).payloads[0].digest).unlink()


def truncated_payload(store: Store) -> None:
    path = blob(store, manifest_here(store).payloads[0].digest)
    path.chmod(0o644)
    os.truncate(path, 10)


def flipped_image(store: Store) -> None:
    flip_a_byte(blob(store, store.version("mlp").images[HERE]["digest"]))


def flipped_manifest(store: Store) -> None:
    image = json.loads(blob(store, store.version("mlp").images[HERE]["digest"]).read_bytes())
    flip_a_byte(blob(store, image["config"]["digest"]))


@pytest.mark.parametrize("damage", [flipped_payload, missing_payload, truncated_payload, flipped_image, flipped_manifest])
def test_a_damaged_rung_is_passed_over_and_named(
    store: Store, damage: Callable[[Store], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(store)
    model = freezer.load("mlp", store=str(store.root))
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    assert [(refusal.rung, refusal.reason) for refusal in model.ladder] == [(HERE, "tampered")]
    assert f"mlp is refused: {HERE}: tampered" in caplog.text
    torch.testing.assert_close(model(X), mlp()(X))
    with pytest.raises(IncompatibleError, match=f"{HERE}: tampered") as caught:
        freezer.load("mlp", store=str(store.root), strict=True)
    assert len(caught.value.ladder) == 1


def test_strict_has_every_reason_and_opens_no_other(scripted: Frozen, portable: Frozen, tmp_path: Path) -> None:
    newer = copy_of(portable.artifact, tmp_path / "newer", needs=Needs(torch="99.0"))
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts={HERE: scripted.artifact, "portable": newer}, carried={})
    flipped_payload(store)
    with pytest.raises(
        IncompatibleError, match=r"the best artifact for this machine .* is refused, and strict=True takes no"
    ) as caught:
        freezer.load("mlp", store=str(store.root), strict=True)
    found = [(refusal.rung, refusal.reason) for refusal in caught.value.ladder]
    assert found == [(HERE, "tampered"), ("portable", "torch_too_old")]


def payloads_of_both(store: Store) -> None:
    flipped_payload(store)
    flip_a_byte(blob(store, store.manifest(store.version("mlp"), "portable").payloads[0].digest))


@pytest.mark.parametrize("damage", [payloads_of_both, flipped_golden_of_both])
def test_where_every_rung_fails_the_ladder_has_every_reason(store: Store, damage: Callable[[Store], None]) -> None:
    damage(store)
    with pytest.raises(IncompatibleError, match=rf"mlp: no artifact serves this machine \(.*\): {HERE}: .*; portable: ") as caught:
        freezer.load("mlp", store=str(store.root))
    assert [refusal.rung for refusal in caught.value.ladder] == [HERE, "portable"]


def test_a_payload_that_does_not_open_is_passed_over(scripted: Frozen, portable: Frozen, tmp_path: Path) -> None:
    broken = copy_of(scripted.artifact, tmp_path / "broken")
    path = broken.folder / broken.manifest.payloads[0].path
    path.unlink()
    path.write_bytes(b"PK no TorchScript")
    payload = broken.manifest.payloads[0]
    from freezer.files.digest import digest_file

    changed = type(payload)(path=payload.path, digest=digest_file(path), size_bytes=17, kind="exported", num_threads=None)
    broken = rewritten(broken, payloads=(changed,))
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts={HERE: broken, "portable": portable.artifact}, carried={})
    model = freezer.load("mlp", store=str(store.root))
    assert [(refusal.rung, refusal.reason) for refusal in model.ladder] == [(HERE, "does_not_open")]


def test_packed_threads_are_held_to(scripted: Frozen, portable: Frozen, tmp_path: Path) -> None:
    other = packed(scripted.artifact, tmp_path / "other", HERE, num_threads=THREADS + 1)
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts={HERE: other, "portable": portable.artifact}, carried={})
    model = freezer.load("mlp", store=str(store.root))
    assert [(refusal.rung, refusal.reason) for refusal in model.ladder] == [(HERE, "threads_mismatch")]
    asked = freezer.load("mlp", store=str(store.root), threads=THREADS + 1)
    assert asked.ladder == ()
    torch.testing.assert_close(asked(X), mlp()(X))
    assert torch.get_num_threads() == THREADS


def test_a_newer_torch_is_asked_for(scripted: Frozen, tmp_path: Path) -> None:
    newer = copy_of(scripted.artifact, tmp_path / "newer", needs=Needs(torch="99.0"))
    with pytest.raises(IncompatibleError, match=r"torch_too_old: got torch 2\..*, expected torch >= 99.0"):
        freezer.load(newer.folder)


def test_a_newer_release_of_classes_does_no_harm(scripted: Frozen, tmp_path: Path) -> None:
    later = copy_of(scripted.artifact, tmp_path / "later", device_class="cpu-of-tomorrow")
    with pytest.raises(IncompatibleError, match="cpu-of-tomorrow: class_mismatch: got a machine for"):
        freezer.load(later.folder)


# Limits of the instruction set


@needs_v4
def test_packed_weights_of_v3_are_refused_on_an_unlimited_v4(scripted: Frozen, portable: Frozen, tmp_path: Path) -> None:
    lesser = packed(scripted.artifact, tmp_path / "v3", V3)
    with pytest.raises(IncompatibleError, match=r"isa_mismatch: got oneDNN packing for avx512 \(float32\) here.*limit_isa=True"):
        freezer.load(lesser.folder)
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("mlp", source_key="key", artifacts={V3: lesser, "portable": portable.artifact}, carried={})
    model = freezer.load("mlp", store=str(store.root))
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    assert [(refusal.rung, refusal.reason) for refusal in model.ladder] == [(V3, "isa_mismatch")]


LOAD = """
import os, sys, torch, freezer
model = freezer.load(sys.argv[1], threads=int(sys.argv[2]), limit_isa=len(sys.argv) > 3)
print(model.manifest.device_class, len(model.ladder), os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


@needs_v4
def test_packed_weights_of_v3_are_served_where_the_environment_limits_onednn(scripted: Frozen, tmp_path: Path) -> None:
    lesser = packed(scripted.artifact, tmp_path / "v3", V3)
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert python(LOAD, lesser.folder, THREADS, env=limited).split() == [V3, "0", "AVX2"]


@needs_v4
def test_limit_isa_sets_the_limit(scripted: Frozen, tmp_path: Path) -> None:
    lesser = packed(scripted.artifact, tmp_path / "v3", V3)
    assert python(LOAD, lesser.folder, THREADS, "limit").split() == [V3, "0", "AVX2"]


# Folders and references


def test_a_folder_is_loaded_by_its_path(scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copy_of(scripted.artifact, tmp_path / "mlp")
    monkeypatch.chdir(tmp_path)
    for reference in (copied.folder, str(copied.folder), "mlp", Path("mlp")):
        torch.testing.assert_close(freezer.load(reference)(X), mlp()(X))
    with pytest.raises(IncompatibleError, match=f"portable: class_mismatch: got only {HERE} published"):
        freezer.load("mlp", device_class="portable")


def test_what_is_not_there_is_said(tmp_path: Path, published: Store) -> None:
    with pytest.raises(NotPublishedError, match=r"holds no manifest\.json"):
        freezer.load(tmp_path)
    with pytest.raises(NotPublishedError, match="model 'none' is not in store"):
        freezer.load("none", store=str(published.root))
    with pytest.raises(StoreUnreachableError, match="is not there"):
        freezer.load("mlp", store=str(tmp_path / "none"))


def test_loading_leaves_the_store_and_the_temporary_folder_as_they_are(published: Store) -> None:
    code = "import sys, freezer, os; freezer.load('mlp', store=sys.argv[1]); print(os.listdir(os.environ['TMPDIR']))"
    before = sorted(path for path in published.root.rglob("*"))
    scratch = published.root.parent / "scratch-of-load"
    scratch.mkdir(exist_ok=True)
    assert python(code, published.root, env={**os.environ, "TMPDIR": str(scratch)}).strip() == "[]"
    assert sorted(path for path in published.root.rglob("*")) == before


# Inductor


def test_an_inductor_payload_opens_without_a_compiler_and_without_a_cache(inductor: Frozen, tmp_path: Path) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    code = """
import sys, torch, freezer
model = freezer.load(sys.argv[1], threads=int(sys.argv[2]))
for batch in (1, 3):
    print(tuple(model(torch.ones(batch, 3, 16, 16)).shape))
print([name for name in sys.modules if name.startswith(("torch._inductor.codecache", "torch._inductor.compile_fx"))])
"""
    env = {"PATH": "/nonexistent", "HOME": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
    assert python(code, inductor.artifact.folder, THREADS, env=env).splitlines() == ["(1, 10)", "(3, 10)", "[]"]
    assert list(cache.iterdir()) == []


def test_the_inductor_artifact_is_refused_where_it_would_take_too_many_threads(inductor: Frozen, tmp_path: Path) -> None:
    larger = packed(inductor.artifact, tmp_path / "larger", HERE, num_threads=THREADS + 1)
    with pytest.raises(IncompatibleError, match=rf"threads_mismatch: got {THREADS} threads, expected {THREADS + 1} "):
        freezer.load(larger.folder)
