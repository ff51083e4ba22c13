"""Cold start: figures from a fresh process, and its errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import GOLDEN_INPUTS
from freezer.errors import JudgeError
from freezer.freezing.judging.cold_start import measure
from freezer.freezing.judging.fresh_process import Opening
from tests.conftest import Frozen
from tests.support.steps import copy_of


def test_fresh_process_is_measured_or_named(scripted: Frozen, tmp_path: Path) -> None:
    artifact = copy_of(scripted.artifact, tmp_path / "copy")
    manifest = artifact.manifest
    opening = Opening(
        folder=artifact.folder,
        payload=manifest.payloads[0],
        settings=manifest.recipe.settings,
        spec=manifest.inputs,
        num_threads=1,
        inputs=artifact.folder / GOLDEN_INPUTS,
    )
    measured = measure(opening)
    assert measured.import_torch_ms > 100, "no package imports torch before"
    assert measured.load_ms > 0
    assert measured.memory_peak_mb > measured.memory_before_mb > 50
    (artifact.folder / manifest.payloads[0].path).write_bytes(b"no TorchScript")
    with pytest.raises(JudgeError, match=r"could not open and call all\.pt: RuntimeError: [^\n]+$"):
        measure(opening)
    with pytest.raises(JudgeError, match=r"missing\.pt"):
        measure(replace(opening, payload=replace(opening.payload, path="payloads/missing.pt")))
