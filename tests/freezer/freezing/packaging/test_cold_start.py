"""What a fresh process takes to serve a payload, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.errors import JudgeError
from freezer.freezing.packaging import cold_start
from freezer.freezing.packaging.cold_start import raised_in
from tests.conftest import Frozen


def test_the_error_of_a_process_is_told_without_its_traceback() -> None:
    lines = (
        "noise",
        "Traceback (most recent call last):",
        "  File 'a.py', line 1",
        "RuntimeError: ",
        "Unknown op: a::b.",
        "  ~~ <--- HERE",
    )
    text = "\n".join(lines)
    assert raised_in(text) == "RuntimeError: Unknown op: a::b."
    assert raised_in("Killed\n") == "Killed"
    assert raised_in("") == "no message"


def test_a_payload_that_does_not_open_is_said_in_a_sentence(scripted: Frozen, tmp_path: Path) -> None:
    payload = tmp_path / "all.pt"
    payload.write_bytes(b"no TorchScript")
    manifest = scripted.artifact.manifest
    with pytest.raises(JudgeError, match=r"^a fresh process could not open and call all\.pt: RuntimeError: [^\n]+$"):
        cold_start.measure(
            payload,
            "torchscript",
            manifest.recipe.settings,
            scripted.artifact.folder / "golden/inputs.safetensors",
            spec=manifest.inputs,
            native=False,
            num_threads=1,
        )
