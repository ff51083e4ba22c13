"""Verify: what `load` would serve, with damage raised and not passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import freezer
from freezer.errors import CanaryError, IncompatibleError, IntegrityError
from freezer.store.store import Store
from tests.conftest import Frozen
from tests.steps import HERE, copy_of, flip_a_byte

THREADS = torch.get_num_threads()


def num_files(folder: Path) -> int:
    """What lies in an artifact folder besides the manifest."""
    return sum(path.is_file() for path in folder.rglob("*")) - 1


def test_a_sound_artifact(published: Store, scripted: Frozen, inductor: Frozen) -> None:
    found = freezer.verify("mlp", store=str(published.root))
    assert (found.device_class, found.num_files, found.ladder) == (HERE, num_files(scripted.artifact.folder), ())
    assert len(found.figures) == 3
    assert freezer.verify(inductor.artifact.folder).num_files == num_files(inductor.artifact.folder) > 6


@pytest.mark.parametrize("name", ["evidence/drift.parquet", "golden/inputs.safetensors", "payloads/all.pt"])
def test_every_file_counts_even_those_that_load_does_not_open(scripted: Frozen, tmp_path: Path, name: str) -> None:
    copied = copy_of(scripted.artifact, tmp_path / "copy")
    flip_a_byte(copied.folder / name)
    with pytest.raises(IntegrityError, match=f"{name} is sha256:"):
        freezer.verify(copied.folder)


def test_damage_is_raised_though_another_rung_would_serve(store: Store) -> None:
    digest = store.manifest(store.version("mlp"), HERE).payloads[0].digest
    flip_a_byte(store.root / "mlp" / "blobs" / "sha256" / digest.removeprefix("sha256:"))
    with pytest.raises(IntegrityError, match="changed or damaged"):
        freezer.verify("mlp", store=str(store.root))
    assert freezer.verify("mlp", store=str(store.root), device_class="portable").device_class == "portable"


def test_a_failing_canary_is_raised(scripted: Frozen, tmp_path: Path) -> None:
    strict = replace(scripted.artifact.manifest.gate, error_ratio_max=0.0)
    golden = tuple(type(item)(point=item.point, native_rmse={"output": -1.0}) for item in scripted.artifact.manifest.golden)
    copied = copy_of(scripted.artifact, tmp_path / "copy", gate=strict, golden=golden)
    with pytest.raises(CanaryError, match="do not serve it here"):
        freezer.verify(copied.folder)


def test_what_is_not_for_this_process_is_incompatible(inductor: Frozen, tmp_path: Path) -> None:
    larger = tuple(replace(payload, num_threads=THREADS + 1) for payload in inductor.artifact.manifest.payloads)
    with pytest.raises(IncompatibleError, match="threads_mismatch") as caught:
        freezer.verify(copy_of(inductor.artifact, tmp_path / "larger", payloads=larger).folder)
    assert caught.value.ladder[0].reason == "threads_mismatch"
