"""torchscript-optimized: the artifact holds the frozen module, and optimize_for_inference is applied where it is opened."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact.folder import GOLDEN_INPUTS, Artifact
from freezer.codec import encode
from freezer.errors import IncompatibleError
from freezer.files.digest import digest_file
from freezer.freezing.recipes.recipes import RECIPES
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.torchscript_loader import open_torchscript
from tests.conftest import Frozen, frozen
from tests.freezer.models_state import RunningMean
from tests.models import Mlp, TinyConv, seeded
from tests.steps import BATCH, HERE, candidate_of, copy_of, judgement_of, python, random_inputs, rewritten, subject_of

SETTINGS = RECIPES["torchscript-optimized"].settings
X = random_inputs(2, 3, 16, 16)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """A torchscript-optimized artifact of a convnet for batch 1 to 4; read it, never write it."""
    out = tmp_path_factory.mktemp("optimized") / "conv"
    return frozen(seeded(TinyConv), X, out, name="conv", recipe="torchscript-optimized", device_class=HERE)


def payload_of(artifact: Artifact) -> Path:
    return artifact.folder / artifact.manifest.payloads[0].path


class Doubling(nn.Module):
    """Has nothing to fold, fuse or lay out."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class OnlyEncode(nn.Module):
    """A file of it has no `forward`, which optimize_for_inference asks for."""

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return x * 2


def with_payload_that_cannot_be_optimized(path: Path) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(OnlyEncode().eval()), str(path))


# What lies in the artifact, and what is opened


def test_the_artifact_holds_the_frozen_module_and_says_what_happens_at_load(optimized: Frozen) -> None:
    manifest = optimized.artifact.manifest
    assert manifest.recipe.settings == {"freeze": True, "optimize_numerics": True, "optimize_for_inference": True}
    with torchscript_deprecations_silenced():
        lying = torch.jit.load(str(payload_of(optimized.artifact)))
    assert "mkldnn" not in str(lying.graph)
    assert "batch_norm" not in str(lying.graph)
    assert manifest.payloads[0].num_threads is None, "weights are laid out at load, for the threads that serve"
    served = open_torchscript(payload_of(optimized.artifact), SETTINGS)
    assert "mkldnn" in str(served.graph)  # type: ignore[attr-defined]


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_it_answers_as_the_source_does(optimized: Frozen, batch: int) -> None:
    x = random_inputs(batch, 3, 16, 16, seed=batch)
    model = freezer.load(optimized.artifact.folder)
    for _ in range(3):  # TorchScript's executor specializes on the first calls
        torch.testing.assert_close(model(x), optimized.model(x).detach(), rtol=1e-4, atol=1e-5)


def test_threads_may_change_after_it_was_opened(optimized: Frozen) -> None:
    before = torch.get_num_threads()
    expected = optimized.model(X).detach()
    try:
        for opened_with in (1, 2):
            torch.set_num_threads(opened_with)
            model = freezer.load(optimized.artifact.folder)
            for num_threads in (2, 1, 3):
                torch.set_num_threads(num_threads)
                torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
                assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_two_instances_do_not_disturb_each_other(optimized: Frozen, tmp_path: Path) -> None:
    one, other = freezer.load(optimized.artifact.folder), freezer.load(optimized.artifact.folder)
    first = one(X)
    assert torch.equal(other(X), first)
    del one
    assert torch.equal(other(X), first)


@pytest.mark.parametrize("model", [Doubling, Mlp])
def test_a_model_with_nothing_to_optimize_is_served_as_well(model: type[nn.Module], tmp_path: Path) -> None:
    x = random_inputs(2, 4)
    subject = subject_of(seeded(model), {"x": x}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "torchscript-optimized", tmp_path / "c")
    found = judgement_of(subject, [candidate])
    assert found.verdict == "published", found.reason
    torch.testing.assert_close(candidate.open(subject)(x), seeded(model)(x).detach())


def test_state_in_a_convnet_stays_state(tmp_path: Path) -> None:
    subject = subject_of(seeded(RunningMean), {"x": random_inputs(2, 3, 8, 8)})
    candidate = candidate_of(subject, "torchscript-optimized", tmp_path / "c")
    model, eager = candidate.open(subject), seeded(RunningMean)
    answers = []
    for seed in (0, 1, 2, 0):
        x = random_inputs(2, 3, 8, 8, seed=seed)
        answers.append(model(x).clone())
        torch.testing.assert_close(answers[-1], eager(x).detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(answers[0], answers[3])


# What fails


def test_where_it_cannot_be_optimized_the_rung_is_refused(optimized: Frozen, tmp_path: Path) -> None:
    copied = copy_of(optimized.artifact, tmp_path / "copy")
    path = payload_of(copied)
    path.unlink()
    with_payload_that_cannot_be_optimized(path)
    payload = replace(copied.manifest.payloads[0], digest=digest_file(path), size_bytes=path.stat().st_size)
    broken = rewritten(copied, payloads=(payload,))
    with pytest.raises(IncompatibleError, match=r"does_not_open: got .*'forward'") as caught:
        freezer.load(broken.folder)
    assert [refusal.reason for refusal in caught.value.ladder] == ["does_not_open"]


def test_where_it_cannot_be_optimized_the_candidate_is_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    subject = subject_of(seeded(TinyConv), {"x": X})
    broken = candidate_of(subject, "torchscript-optimized", tmp_path / "broken")
    with_payload_that_cannot_be_optimized(broken.folder / broken.payloads[0].path)
    found = judgement_of(subject, [broken, candidate_of(subject, "torchscript-frozen", tmp_path / "c")])
    assert found.verdict == "published"
    problem = found.trials[0].problem
    assert problem is not None
    assert "'forward'" in problem


# Cold start

SPY = """
import json, sys, torch
from freezer.freezing.packaging.cold_start import main
applied, real = [], torch.jit.optimize_for_inference
def optimize(*args, **kwargs):
    applied.append(1)
    return real(*args, **kwargs)
torch.jit.optimize_for_inference = optimize
figures = main(json.loads(sys.argv[1]))
print(len(applied), figures["open_ms"] > 0, figures["first_call_ms"] > 0)
"""


@pytest.mark.parametrize(("settings", "applied"), [(SETTINGS, "1"), ({**SETTINGS, "optimize_for_inference": False}, "0")])
def test_the_cold_start_figures_include_it(optimized: Frozen, settings: dict[str, bool], applied: str) -> None:
    manifest, folder = optimized.artifact.manifest, optimized.artifact.folder
    request = {
        "payload": str(payload_of(optimized.artifact)),
        "kind": "torchscript",
        "settings": dict(settings),
        "inputs": str(folder / GOLDEN_INPUTS),
        "spec": encode(manifest.inputs),
        "native": manifest.payloads[0].convention == "native",
        "num_threads": 1,
        "device": "cpu",
    }
    assert python(SPY, json.dumps(request)).split() == [applied, "True", "True"]
    assert manifest.latency is not None
    assert manifest.latency.cold_start is not None
    assert manifest.latency.cold_start.open_ms > 0
