"""verify: digests, damage, canary and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import freezer
from freezer.errors import IncompatibleError, IntegrityError
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.steps import HERE, blob_of, copy_of, flip_a_byte


def test_verify_counts_files_and_figures(published: Store, scripted: Frozen) -> None:
    found = freezer.verify("mlp", store=str(published.root))
    paths = [path for path in scripted.artifact.folder.rglob("*") if path.is_file()]
    num_files = len(paths) - 1  # without the manifest
    assert (found.device_class, found.num_files, found.ladder) == (HERE, num_files, ())
    assert len(found.figures) == len(scripted.artifact.manifest.golden)


def test_damage_raises_instead_of_falling_back(store: Store) -> None:
    digest = store.manifest(store.version("mlp"), HERE).payloads[0].digest
    flip_a_byte(blob_of(store.root / "mlp", digest))
    with pytest.raises(IntegrityError):
        freezer.verify("mlp", store=str(store.root))
    other = freezer.verify("mlp", store=str(store.root), device_class="portable")
    assert other.device_class == "portable"


def test_a_payload_that_does_not_open_is_incompatible(scripted: Frozen, tmp_path: Path) -> None:
    """Its digest matches, so the bytes are the published ones; this machine may lack memory, for
    example.
    """
    other_kind = tuple(
        replace(payload, kind="exported") for payload in scripted.artifact.manifest.payloads
    )
    copied = copy_of(scripted.artifact, tmp_path / "copy", payloads=other_kind)
    with pytest.raises(IncompatibleError) as caught:
        freezer.verify(copied.folder)
    assert [refusal.reason for refusal in caught.value.ladder] == ["does_not_open"]
