"""Records of a freeze: in the manifest, in the evidence, and in `coldpress inspect`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
from freezer.store import Store
from tests.conftest import Frozen
from tests.freezer.cli.conftest import Run
from tests.support.models import Branching, ConvNet
from tests.support.steps import (
    ANY_SPEED,
    HERE,
    QUICK,
    QUICK_OPTIONS,
    copy_of,
    flip_a_byte,
    random_inputs,
    write_plain_artifact,
)

TEXTS = ["all-captured-code.txt", "all-captured-graph.txt", "all-code.txt", "all-graph.txt"]


@pytest.fixture(scope="module")
def two_recipes(tmp_path_factory: pytest.TempPathFactory) -> FreezeResult:
    """A stateful convnet, frozen with two recipes that work and one that cannot."""

    class Counting(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return super().forward(x)

    return freeze(
        Counting().eval(),
        {"x": random_inputs(2, 3, 8, 8)},
        out=tmp_path_factory.mktemp("two") / "out",
        options=FreezeOptions(
            recipes=["torchscript-frozen", "torchscript-exact", "inductor-frozen"],
            device_class=HERE,
            limits=ANY_SPEED,
            policy=QUICK,
        ),
    )


def test_the_manifest_records_every_candidate(two_recipes: FreezeResult) -> None:
    assert two_recipes.artifact is not None
    manifest = two_recipes.artifact.manifest
    freezing = manifest.freezing
    report = freezing.reports["payloads/all.pt"]
    (other,) = freezing.candidates
    assert {manifest.recipe.name, other.recipe} == {"torchscript-frozen", "torchscript-exact"}
    both = {manifest.recipe.name: report, other.recipe: other.reports["payloads/all.pt"]}
    assert "aten::batch_norm" not in both["torchscript-frozen"].ops_after
    assert "aten::batch_norm" in both["torchscript-exact"].ops_after
    for found in both.values():
        assert set(found.phases_s) >= {"capture", "freeze", "save", "report"}
        assert found.size_before_bytes == 3 * (4 * (81 + 3 + 4 * 3) + 8) + 4
        assert found.size_after_bytes > 0
        assert [item.name for item in found.kept] == ["calls"]
    assert freezing.strides_equal is True
    assert other.strides_equal is True
    assert (other.problem, other.capture, other.lowering) == (None, "trace", "torchscript")
    assert other.tried[-1]["outcome"] == "captured and lowered"
    assert "the payload would lose it" in freezing.failures["inductor-frozen"]


def test_inspect_prints_code(coldpress: Run, store: Store, tmp_path: Path) -> None:
    pulled = store.pull(store.version("mlp"), HERE, tmp_path / "pulled")
    assert sorted(path.name for path in (pulled.folder / "evidence").glob("*.txt")) == TEXTS
    for arguments in ((pulled.folder,), ("mlp", "--store", store.root)):
        code, out, _ = coldpress("inspect", *arguments, "--code")
        assert (code, out) == (0, (pulled.folder / "evidence/all-code.txt").read_text())


def test_inspect_prints_a_captured_program(coldpress: Run, portable: Frozen) -> None:
    code, out, _ = coldpress("inspect", portable.artifact.folder, "--code")
    assert code == 0
    assert "torch.ops.aten.linear.default" in out
    report = portable.artifact.manifest.freezing.reports["payloads/all.pt2"]
    assert report.ops_before == report.ops_after
    assert report.num_constants == 0
    assert report.notes[-1].startswith("The payload is the captured program")


def test_inspect_shows_what_freezing_did(coldpress: Run, two_recipes: FreezeResult) -> None:
    assert two_recipes.artifact is not None
    code, out, _ = coldpress("inspect", two_recipes.artifact.folder)
    assert code == 0
    words = " ".join(out.split())
    for part in (
        "tried all: trace -> torchscript: captured and lowered",
        "aten::dropout 2 -> 0",
        "stays calls: a call changes it",
        "strides of all outputs equal to eager's",
        "candidate torchscript-",
        "not built inductor-frozen: ",
    ):
        assert part in words, part


def test_inspect_reports_missing_and_damaged_texts(
    coldpress: Run, tmp_path: Path, scripted: Frozen
) -> None:
    old = write_plain_artifact(tmp_path / "old")
    code, _, err = coldpress("inspect", old.folder, "--code")
    assert code == 1
    assert "tiny for portable contains no evidence/all-code.txt; earlier releases" in err
    damaged = copy_of(scripted.artifact, tmp_path / "damaged")
    flip_a_byte(damaged.folder / "evidence/all-code.txt")
    code, _, err = coldpress("inspect", damaged.folder, "--code")
    assert (code, "it was changed or damaged" in err) == (1, True)


def test_errors_of_failed_attempts_are_files(tmp_path: Path) -> None:
    options = replace(QUICK_OPTIONS, recipes=["torchscript-frozen"])
    result = freeze(
        Branching().eval(), {"x": random_inputs(2, 4)}, out=tmp_path / "out", options=options
    )
    assert result.artifact is not None, result.failures
    (failed,) = [item for item in result.artifact.manifest.files if "-error" in item.path]
    assert failed.path.endswith("-trace-error.txt")
    result.artifact.verify((failed,))
    assert "Traceback" in (result.artifact.folder / failed.path).read_text()
