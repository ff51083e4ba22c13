"""Tensors that a build may free: those of its own copy of the model, after the outermost graph has
copied them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from freezer.freezing.capture import Captured
from freezer.freezing.lowering.inductor import compilation as inductor
from freezer.freezing.recipes import RECIPES, CaptureName
from freezer.freezing.target import target_here
from freezer.runtime.loaders import open_inductor
from freezer.runtime.tensors import address_of, addresses_of
from tests.support.models import seeded
from tests.support.models_inductor import Foreign
from tests.support.steps import BATCH, HERE, captured_by, random_inputs, subject_of

X = random_inputs(2, 8)


def captured(model: nn.Module, name: CaptureName = "export") -> Captured:
    return captured_by(subject_of(model, {"x": X}, {"x": {0: BATCH}}), name)


@pytest.mark.slow
def test_build_frees_its_own_tensors_only(tmp_path: Path) -> None:
    model = seeded(Foreign)
    assert isinstance(model, Foreign)
    before = [tensor.clone() for tensor in model.theirs]
    found = captured(model)
    packed = found.program.state_dict["model.head.weight"]
    assert address_of(packed) in addresses_of(found.owned)
    inductor.build(
        found,
        tmp_path / "all.pt2",
        target_here(HERE, torch.get_num_threads()),
        RECIPES["inductor-frozen"].settings,
    )
    assert [
        bool(torch.equal(one, other)) for one, other in zip(before, model.theirs, strict=True)
    ] == [True] * 4
    assert address_of(packed) is None, "the copy is freed where the frozen graph has another"
    run = open_inductor(tmp_path / "all.pt2", {})
    for x in (X.abs(), -X.abs()):
        with torch.no_grad():
            torch.testing.assert_close(run(x)[0], model(x))
