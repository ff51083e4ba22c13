"""Cold start: figures from a fresh process, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.errors import JudgeError
from freezer.freezing.judging import Opening, measure
from freezer.freezing.judging.cold_start import raised_in
from tests.conftest import Frozen
from tests.support.steps import copy_of


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            (
                "noise\nTraceback (most recent call last):\n  File 'a.py', line 1\nRuntimeError:"
                " \nUnknown op: a::b.\n  ~~ <--- HERE"
            ),
            "RuntimeError: Unknown op: a::b.",
        ),
        ("Killed\n", "Killed"),
        ("", "no message"),
    ],
)
def test_raised_in_strips_the_traceback(stderr: str, message: str) -> None:
    assert raised_in(stderr) == message


def test_measure_reports_a_payload_that_fails(scripted: Frozen, tmp_path: Path) -> None:
    broken = copy_of(scripted.artifact, tmp_path / "broken")
    manifest = broken.manifest
    (broken.folder / manifest.payloads[0].path).write_bytes(b"no TorchScript")
    with pytest.raises(
        JudgeError, match=r"^a fresh process could not open and call all\.pt: RuntimeError: [^\n]+$"
    ):
        measure(
            Opening(
                folder=broken.folder,
                payload=manifest.payloads[0],
                settings=manifest.recipe.settings,
                spec=manifest.inputs,
                num_threads=1,
            )
        )
