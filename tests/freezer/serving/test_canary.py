"""The canary: golden inputs on this machine, compared by the gate's formula."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import freezer
from freezer.artifact import Artifact
from freezer.errors import CanaryError, IncompatibleError
from freezer.runtime.contract import OpenPayload
from freezer.runtime.frozen_model import FrozenModel
from freezer.serving.canary import run_canary
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from tests.conftest import Frozen
from tests.support.steps import artifact_of, quickly, random_inputs, with_golden


def answering(artifact: Artifact, change: float = 0.0, factor: float | Tensor = 1.0) -> FrozenModel:
    """The artifact's model on a machine with slightly different results."""
    model = open_artifact(artifact, torch.get_num_threads(), LoadOptions(canary=False))
    payload = artifact.manifest.payloads[0]

    def run(*tensors: Tensor) -> list[Tensor]:
        return [leaf * factor + change for leaf in model.leaves(*tensors)]

    manifest = artifact.manifest
    return FrozenModel(
        spec=manifest.inputs,
        outputs=manifest.outputs,
        structure=manifest.structure,
        payloads=[OpenPayload(payload=payload, run=run)],
        manifest=manifest,
    )


@pytest.mark.parametrize(
    ("factor", "change", "passes"),
    [
        (1 + 2e-6, 0.0, True),
        (1 + 1e-3, 0.0, False),
        (1.0, 1e-3, False),
        (1.0, float("nan"), False),
        (1.0, float("inf"), False),
    ],
)
def test_only_small_differences_pass(
    portable: Frozen, factor: float, change: float, passes: bool
) -> None:
    model = answering(portable.artifact, change, factor)
    with nullcontext() if passes else pytest.raises(CanaryError):
        run_canary(portable.artifact, model)


class TopTwo(torch.nn.Module):
    """All scores but the best two are masked."""

    def forward(self, x: Tensor) -> Tensor:
        best, places = x.topk(2, -1)
        return torch.full_like(x, -1e9).scatter(-1, places, best)


def test_small_parts_are_compared(tmp_path: Path) -> None:
    """The artifact records what the gate judges apart, and the canary does so, too."""
    artifact = artifact_of(quickly(TopTwo(), [random_inputs(2, 40)], tmp_path / "made"))
    run_canary(artifact, answering(artifact))
    with pytest.raises(CanaryError):
        run_canary(artifact, answering(artifact, change=0.1))


@pytest.mark.parametrize(
    "golden", [torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.float64), torch.zeros(4)]
)
def test_other_shapes_and_dtypes_fail(portable: Frozen, tmp_path: Path, golden: Tensor) -> None:
    artifact = with_golden(portable.artifact, tmp_path / "copy", lambda _: golden, "0/output")
    with pytest.raises(CanaryError):
        run_canary(artifact, answering(artifact))


def test_load_runs_the_smallest_set_of_each_payload(portable: Frozen, tmp_path: Path) -> None:
    """The sets of other sizes are run by `verify`, and by `load` if one of the smallest differs."""
    artifact = portable.artifact
    sizes = [item.point["batch"] for item in artifact.manifest.golden]
    least, most = sizes.index(1), sizes.index(4)
    (figure,) = run_canary(artifact, answering(artifact), smallest=True)
    assert figure.set_index == least
    larger = with_golden(artifact, tmp_path / "larger", lambda y: y + 1, f"{most}/output")
    assert freezer.load(larger.folder).ladder == ()
    with pytest.raises(CanaryError):
        freezer.verify(larger.folder)


def test_few_elements_are_judged_over_all_sets(portable: Frozen, tmp_path: Path) -> None:
    artifact = portable.artifact
    sizes = [item.point["batch"] for item in artifact.manifest.golden]
    name = f"{sizes.index(1)}/output"
    other = with_golden(artifact, tmp_path / "other", lambda y: y * (1 + 1.5e-5), name)
    figures = run_canary(other, answering(other), smallest=True)
    assert {figure.set_index for figure in figures} == set(range(len(sizes)))


def test_load_refuses_a_failing_canary(portable: Frozen, tmp_path: Path) -> None:
    artifact = with_golden(portable.artifact, tmp_path / "copy", lambda y: y + 1)
    with pytest.raises(IncompatibleError) as caught:
        freezer.load(artifact.folder)
    assert caught.value.ladder[0].reason == "canary"
    assert freezer.load(artifact.folder, canary=False).ladder == ()
