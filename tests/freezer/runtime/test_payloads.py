"""Opening payloads: an exported program runs as its own module does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.freezing.lowering import exported_programs as exported
from freezer.freezing.target import target_here
from freezer.runtime.loaders.exported import open_exported
from tests.support.models import Counter, Mlp, seeded
from tests.support.steps import HERE, captured_by, random_inputs, subject_of


@pytest.mark.parametrize("make", [Mlp, Counter], ids=["stateless", "stateful"])
def test_a_program_runs_as_its_module(make: type[nn.Module], tmp_path: Path) -> None:
    x = random_inputs(2, 4)
    captured = captured_by(subject_of(seeded(make), {"x": x}), "export")
    exported.build(captured, tmp_path / "all.pt2", target_here(HERE, (1,)), {})
    run, module = (
        open_exported(tmp_path / "all.pt2", {}),
        torch.export.load(str(tmp_path / "all.pt2")).module(),
    )
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), module(x), rtol=0, atol=0)
