"""verify: digests, damage, canary and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import freezer
from freezer.errors import IncompatibleError
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.steps import HERE, copy_of


def test_verify_counts_files_and_figures(published: Store, scripted: Frozen) -> None:
    found = freezer.verify("mlp", store=str(published.root))
    paths = [path for path in scripted.artifact.folder.rglob("*") if path.is_file()]
    num_files = len(paths) - 1  # without the manifest
    assert (found.device_class, found.num_files, found.ladder) == (HERE, num_files, ())
    assert len(found.figures) == len(scripted.artifact.manifest.golden)


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
