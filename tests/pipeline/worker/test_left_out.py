"""A candidate that ends the judge is left out, and the others are judged: real faults in the
children of a judge, without Ray. The candidates are copies of one build.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Artifact
from freezer.freezing.sources import parse_source
from freezer.spec import Dim, InputSpec, Limits, TensorSpec
from pipeline.catalog import Entry
from pipeline.failures import CODES
from pipeline.worker import BuildRequest, JudgeRequest, JudgeResult, build, judge
from pipeline.workspace import note_digests, workplace
from tests.support.campaigns import judged_folder
from tests.support.steps import HERE, QUICK

MODELS = Path(__file__).parents[1] / "models"
RECIPES = (
    "torchscript-frozen",
    "torchscript-exact",
    "inductor-frozen",
    "inductor",
    "onnxruntime",
)
STAGES = ("opening", "validating", "timing", "sizes")
KINDS = ("crash", "timeout", "memory")


def common(store: Path, faults: dict[str, str], folder: str = "") -> dict[str, Any]:
    path = (str(MODELS),)
    args = {"faults": faults, "folder": folder}
    entry = Entry(
        name="faulty",
        source=parse_source(
            "python:faulty_models:faulty", folder=MODELS, search_path=path, args=args
        ),
        spec=InputSpec(
            inputs=(TensorSpec(name="input", dtype="float32", shape=("batch", 16)),),
            dims=(Dim(name="batch", min=1, max=4),),
        ),
        samples=None,
        task_metric=None,
        limits=Limits(speedup_min=0.0, timeout_s=16, memory_gb=2),
        device_classes=(HERE,),
        recipes=RECIPES,
        files=(),
        search_path=path,
    )
    return {"entry": entry, "device_class": HERE, "num_threads": 1, "store": str(store)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a candidate for each recipe."""
    store = tmp_path_factory.mktemp("store")
    first, *others = RECIPES
    (built,) = build(BuildRequest(builds={first: first}, **common(store, {})))
    assert built.failure is None, built.failure
    candidate = workplace(str(store)).folder("candidates", first)
    for recipe in others:
        copy = candidate.with_name(recipe)
        shutil.copytree(candidate, copy)
        record = json.loads((copy / "candidate.json").read_text())
        (copy / "candidate.json").write_text(json.dumps({**record, "recipe": recipe}))
        (copy / "digests.json").unlink()
        note_digests(copy)
    return store


def judged(
    store: Path, folder: Path, faults: dict[str, str], recipes: tuple[str, ...] = RECIPES
) -> JudgeResult:
    victims = folder / "victims"
    victims.mkdir()
    return judge(
        JudgeRequest(
            key=folder.name,
            builds={recipe: recipe for recipe in recipes},
            policy=QUICK,
            campaign="c",
            **common(store, faults, str(victims)),
        )
    )


@pytest.mark.parametrize("turn", range(3))
def test_each_fault_costs_one_candidate(store: Path, tmp_path: Path, turn: int) -> None:
    """Each of crash, hang and memory in each of opening, validating, timing and other sizes."""
    faults = {stage: KINDS[(turn + index) % 3] for index, stage in enumerate(STAGES)}
    result = judged(store, tmp_path, faults)
    assert result.verdict == "published", result.reason
    victims = {path.name: path.read_text() for path in (tmp_path / "victims").iterdir()}
    assert victims.keys() == set(STAGES)
    assert set(victims.values()) == result.left_out.keys()
    for stage, recipe in victims.items():
        left_out = result.left_out[recipe]
        assert (left_out.kind, left_out.code) == (faults[stage], CODES[faults[stage]])
        activity = "timing" if stage == "sizes" else stage
        assert f"{faults[stage]} while {activity}" in left_out.message
    (survivor,) = result.candidates
    assert (result.recipe, survivor.problem) == (survivor.recipe, None)
    folder = judged_folder(store, tmp_path.name, "faulty", sorted(victims.values()))
    recorded = Artifact.read(folder / "artifact").manifest.freezing.failures
    assert recorded == {recipe: why.message for recipe, why in result.left_out.items()}
    assert JudgeResult.from_json(json.loads((folder / "result.json").read_text())) == result


def test_only_candidate_that_crashes_fails_the_item(store: Path, tmp_path: Path) -> None:
    result = judged(store, tmp_path, {"validating": "crash"}, RECIPES[:1])
    assert (result.verdict, result.has_artifact) == ("failed", False)
    assert result.failure is not None
    assert result.failure.code == "CP-CRASH"
    assert result.left_out.keys() == {RECIPES[0]}


def test_crash_of_the_source_fails_the_item(store: Path, tmp_path: Path) -> None:
    result = judged(store, tmp_path, {"source": "crash"})
    assert result.failure is not None
    assert (result.verdict, result.failure.code) == ("failed", "CP-CRASH")
    assert not result.left_out
