"""Copies of source models, also on another device: `meta` shows what was moved, `cpu:0`
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.freezing.candidates import build
from freezer.freezing.judging import judge
from freezer.freezing.models import module_of
from freezer.freezing.models.calls import copied, model_on
from freezer.freezing.packaging import assemble
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import target_here
from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.models import Counter, Mlp, seeded
from tests.support.steps import BATCH, HERE, random_inputs, session_of, subject_of

X = random_inputs(2, 4)


class HoldsTorchScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torchscript_deprecations_silenced():
            self.part = torch.jit.script(seeded(Mlp))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


@pytest.mark.parametrize("make", [lambda: seeded(Mlp), HoldsTorchScript])
def test_copy_shares_nothing_with_its_source(make: type[nn.Module]) -> None:
    model = make().eval()
    copy = copied(model)
    with torch.no_grad():
        assert torch.equal(copy(X), model(X))
        expected = model(X).clone()
        for tensor in copy.state_dict().values():
            tensor.mul_(2)
        assert torch.equal(model(X), expected)
        assert not torch.equal(copy(X), expected)


class Ring(nn.Module):
    """Writes into a tensor; a buffer is a view of its first rows."""

    def __init__(self, *, hold: Callable[[Tensor], Any] = lambda whole: whole) -> None:
        super().__init__()
        whole = torch.zeros(64, 4)
        self.ring, self.head = hold(whole), nn.Buffer(whole[:8])

    def forward(self, x: Tensor) -> Tensor:
        ring = self.ring[0] if isinstance(self.ring, list) else self.ring
        ring[:2].add_(x)
        return self.head.sum(0) + x


@pytest.mark.parametrize("hold", [nn.Buffer, lambda whole: [whole]])
def test_overlapping_tensors_overlap_in_the_copy(hold: Callable[[Tensor], Any]) -> None:
    model = Ring(hold=hold).eval()
    copy = copied(model)
    with torch.no_grad():
        answers = [copy(X) for _ in range(3)]
        assert float(torch.as_tensor(model.head).abs().sum()) == 0
        assert all(torch.equal(answer, model(X)) for answer in answers)
    assert not torch.equal(answers[0], answers[1])


META = torch.device("meta")


def test_model_on_renames_devices_in_graphs() -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(2, device=x.device)

    program = torch.export.export(Making().eval(), (torch.ones(2),), strict=False)
    moved = model_on(module_of(program), META)
    assert moved(torch.ones(2, device="meta")).is_meta


def test_freeze_on_another_device(tmp_path: Path) -> None:
    target = replace(target_here(HERE, 1), device=torch.device("cpu", 0))
    subject = subject_of(seeded(Counter), {"x": X}, {"x": {0: BATCH}})
    (tmp_path / "candidate").mkdir()
    session = session_of(subject, target)
    candidate = build(
        session.subject, RECIPES["torchscript-frozen"], target, tmp_path / "candidate"
    )
    judgement = judge(session, [candidate])
    assert judgement.winner is not None, judgement.reason
    assert session.reference.float64
    artifact = assemble(session, judgement, dest=tmp_path / "out", provenance={}, failures={})
    torch.testing.assert_close(freezer.load(artifact.folder)(x=X), subject.fresh()(X))
