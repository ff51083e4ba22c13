"""A candidate that ends the judge is left out, and the others are judged: real faults in the
children of a judge, without Ray. The candidates are copies of one build.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Artifact
from freezer.spec import InputSpec, Limits, TensorSpec
from pipeline.failures import CODES
from pipeline.worker import BuildRequest, JudgeRequest, JudgeResult, build
from pipeline.workspace import note_digests, workplace
from tests.support.campaigns import good_entry, good_source, judged_folder
from tests.support.judges import judge
from tests.support.steps import BATCH, HERE, QUICK

RECIPES = ("torchscript-frozen", "torchscript-exact", "inductor-frozen", "inductor", "onnxruntime")
STAGES = ("opening", "validating", "timing", "sizes")
KINDS = ("crash", "timeout", "memory")


def common(store: Path, faults: dict[str, str], victims: Path) -> dict[str, Any]:
    victims.mkdir()
    x = TensorSpec(name="input", dtype="float32", shape=("batch", 16))
    entry = replace(
        good_entry(),
        source=good_source("faulty_models:faulty", faults=faults, folder=str(victims)),
        spec=InputSpec(inputs=(x,), dims=(BATCH,)),
        limits=Limits(speedup_min=0.0, timeout_s=16, memory_gb=2),
    )
    return {"entry": entry, "device_class": HERE, "threads": (1,), "store": str(store)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a candidate for each recipe."""
    store = tmp_path_factory.mktemp("store")
    first, *others = RECIPES
    (built,) = build(BuildRequest(builds={first: first}, **common(store, {}, store / "none")))
    assert built.failure is None, built.failure
    candidate = workplace(str(store)).folder("candidates", first)
    for recipe in others:
        copy = shutil.copytree(candidate, candidate.with_name(recipe))
        record = json.loads((copy / "candidate.json").read_text())
        (copy / "candidate.json").write_text(json.dumps({**record, "recipe": recipe}))
        (copy / "digests.json").unlink()
        note_digests(copy)
    return store


def judged(store: Path, folder: Path, faults: dict[str, str], num: int) -> JudgeResult:
    builds = {recipe: recipe for recipe in RECIPES[:num]}
    given = common(store, faults, folder / "victims")
    return judge(JudgeRequest(key=folder.name, builds=builds, policy=QUICK, campaign="c", **given))


def test_each_fault_costs_one_candidate(store: Path, tmp_path: Path) -> None:
    """Crash, hang and memory, in opening, validating, timing and other sizes."""
    faults = dict(zip(STAGES, (*KINDS, KINDS[0]), strict=True))
    result = judged(store, tmp_path, faults, 5)
    assert result.verdict == "published", result.reason
    victims = {stage: (tmp_path / "victims" / stage).read_text() for stage in STAGES}
    assert {stage: result.left_out[victims[stage]].code for stage in STAGES} == {
        stage: CODES[kind] for stage, kind in faults.items()
    }
    for stage, recipe in victims.items():
        activity = "timing" if stage == "sizes" else stage
        assert f"{faults[stage]} while {activity}" in result.left_out[recipe].message
    (survivor,) = result.candidates
    assert (result.recipe, survivor.problem) == (survivor.recipe, None)
    folder = judged_folder(store, tmp_path.name, "good", sorted(victims.values()))
    recorded = Artifact.read(folder / "artifact").manifest.freezing.failures
    assert recorded == {recipe: why.message for recipe, why in result.left_out.items()}
    assert JudgeResult.from_json(json.loads((folder / "result.json").read_text())) == result


@pytest.mark.parametrize(("stage", "num", "num_left_out"), [("validating", 1, 1), ("source", 5, 0)])
def test_crash_without_alternative_fails_the_item(
    store: Path, tmp_path: Path, stage: str, num: int, num_left_out: int
) -> None:
    result = judged(store, tmp_path, {stage: "crash"}, num)
    assert result.failure is not None
    assert (result.verdict, result.failure.code) == ("failed", "CP-CRASH")
    assert len(result.left_out) == num_left_out
