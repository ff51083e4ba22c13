"""Records of a freeze: in the manifest, in the evidence, and in `coldpress inspect`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from freezer.artifact.folder import Artifact
from freezer.artifact.sections import FreezingRecord, Migration
from freezer.cli.app import main
from freezer.freezing.freeze import FreezeResult, freeze
from freezer.freezing.options import FreezeOptions
from freezer.freezing.packaging.evidence import MAX_TEXT_BYTES, write_evidence, write_texts
from freezer.freezing.validation.trials import Trial
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.store.store import Store
from tests.conftest import Frozen
from tests.freezer.models_reports import ConvNet, Stateful
from tests.models import Branching
from tests.steps import ANY_SPEED, HERE, QUICK, QUICK_OPTIONS, copy_of, flip_a_byte, random_inputs, write_plain_artifact

TEXTS = ["all-captured-code.txt", "all-captured-graph.txt", "all-code.txt", "all-graph.txt"]


def inspected(*arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["coldpress", "inspect", *(str(argument) for argument in arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    found = capsys.readouterr()
    return int(caught.value.code or 0), found.out, found.err


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
    folded = {recipe: sum("folded" in change.name for change in found.changes) for recipe, found in both.items()}
    assert folded == {"torchscript-frozen": 1, "torchscript-exact": 0}
    for found in both.values():
        assert set(found.phases_s) >= {"capture", "freeze", "save", "report"}
        assert found.size_before_bytes == 3 * (4 * (81 + 3 + 4 * 3) + 8) + 4
        assert found.size_after_bytes > 0
        assert [item.name for item in found.kept] == ["calls"]
    assert freezing.strides_equal is True
    assert other.strides_equal is True
    assert (other.problem, other.capture, other.lowering) == (None, "trace", "torchscript")
    assert other.tried[-1]["outcome"] == "captured and lowered"
    assert "freezing would bake" in freezing.failures["inductor-frozen"]


def test_docs_list_every_field_of_the_record() -> None:
    page = (Path(__file__).parents[3] / "docs" / "contract.md").read_text()
    section = page.partition("The manifest's `freezing` holds")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {field.name for field in fields(FreezingRecord)} <= named
    assert {field.name for field in fields(Migration)} <= named


def test_inspect_prints_code_and_graph(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = store.pull(store.version("mlp"), HERE, tmp_path / "pulled")
    assert sorted(path.name for path in (pulled.folder / "evidence").glob("*.txt")) == TEXTS
    for arguments in ((pulled.folder,), ("mlp", "--store", store.root)):
        code, out, _ = inspected(*arguments, "--code", monkeypatch=monkeypatch, capsys=capsys)
        assert (code, out) == (0, (pulled.folder / "evidence/all-code.txt").read_text())
        code, out, _ = inspected(*arguments, "--graph", "--captured", monkeypatch=monkeypatch, capsys=capsys)
        assert (code, out) == (0, (pulled.folder / "evidence/all-captured-graph.txt").read_text())


def test_inspect_prints_a_captured_program(
    portable: Frozen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = inspected(portable.artifact.folder, "--code", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "torch.ops.aten.linear.default" in out
    report = portable.artifact.manifest.freezing.reports["payloads/all.pt2"]
    assert report.ops_before == report.ops_after
    assert report.num_constants == 0
    assert report.notes[-1].startswith("The payload is the captured program")


def test_inspect_shows_what_freezing_did(
    two_recipes: FreezeResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert two_recipes.artifact is not None
    code, out, _ = inspected(two_recipes.artifact.folder, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    words = " ".join(out.split())
    for part in (
        "tried all: trace -> torchscript: captured and lowered",
        "dropouts removed 2",
        "stays attribute calls: `forward` changes it in place (aten::add_) at test_inspect.py:",
        "unused features.1.num_batches_tracked",
        "strides of all outputs equal to eager's",
        "candidate torchscript-",
        "not built inductor-frozen: ",
    ):
        assert part in words, part


def test_inspect_reports_missing_and_damaged_texts(
    tmp_path: Path, scripted: Frozen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_plain_artifact(tmp_path / "old")
    code, _, err = inspected(old.folder, "--graph", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    assert "tiny for portable contains no evidence/all-graph.txt; earlier releases" in err
    code, _, err = inspected(old.folder, "--captured", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "--captured needs --code or --graph" in err) == (2, True)
    damaged = copy_of(scripted.artifact, tmp_path / "damaged")
    flip_a_byte(damaged.folder / "evidence/all-code.txt")
    code, _, err = inspected(damaged.folder, "--code", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "it was changed or damaged" in err) == (1, True)


def test_evidence_without_pyarrow_is_json(
    scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    judgement = scripted.result.judgement
    assert judgement is not None
    with caplog.at_level("INFO", logger="coldpress"):
        assert write_evidence(judgement, tmp_path) == ("evidence/latency.json", "evidence/drift.json")
    assert "writing evidence as JSON" in caplog.text
    written = json.loads((tmp_path / "evidence/latency.json").read_text())
    whole = pq.read_table(scripted.artifact.folder / "evidence/latency.parquet").to_pydict()
    assert written == whole
    drift = json.loads((tmp_path / "evidence/drift.json").read_text())
    assert drift.keys() == pq.read_table(scripted.artifact.folder / "evidence/drift.parquet").to_pydict().keys()
    candidate = replace(judgement.trials[0].candidate, folder=scripted.artifact.folder)
    assert write_texts(candidate, tmp_path) == tuple(f"evidence/{name}" for name in TEXTS)


def test_long_texts_are_cut(scripted: Frozen, tmp_path: Path) -> None:
    judgement = scripted.result.judgement
    assert judgement is not None
    source = tmp_path / "candidate"
    (source / "evidence").mkdir(parents=True)
    line = "é" * 50 + "\n"
    (source / "evidence" / "all-graph.txt").write_text(line * 30_000)
    (source / "evidence" / "all-code.txt").write_text("é" * MAX_TEXT_BYTES)
    (tmp_path / "artifact").mkdir()
    write_texts(replace(judgement.trials[0].candidate, folder=source), tmp_path / "artifact")
    graph, code = ((tmp_path / "artifact" / "evidence" / name).read_text() for name in ("all-graph.txt", "all-code.txt"))
    kept, _, last = graph.rstrip("\n").rpartition("\n")
    assert set(kept.splitlines()) == {line.strip()}
    left = 30_000 * 101 - len(f"{kept}\n".encode())
    assert last == f"... cut here: {left} of 3030000 bytes are left out"
    assert len(kept.encode()) <= MAX_TEXT_BYTES
    assert code.splitlines()[0] == "é" * (MAX_TEXT_BYTES // 2)
    assert code.splitlines()[1].startswith("... cut here: ")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (None, True),
        ("error_ratio 41 > 3", True),
        ("strides (1, 2), eager's are (2, 1)", False),
    ],
)
def test_strides_equal(scripted: Frozen, problem: str | None, expected: bool | None) -> None:
    judgement = scripted.result.judgement
    assert judgement is not None
    trial = judgement.trials[0]
    assert trial.drift is not None
    rows = (replace(trial.drift.rows[0], problem=problem), *trial.drift.rows[1:])
    assert replace(trial, drift=replace(trial.drift, rows=rows)).strides_equal is expected
    assert Trial(candidate=trial.candidate, drift=None, problem="it broke").strides_equal is None


def test_preserved_names_are_in_the_manifest(tmp_path: Path) -> None:
    with torchscript_deprecations_silenced():
        model: nn.Module = torch.jit.script(Stateful().eval())
    options = replace(QUICK_OPTIONS, recipes=["torchscript-frozen"], preserve=["version"], reset="reset")
    result = freeze(model, {"x": random_inputs(2, 4)}, out=tmp_path / "out", options=options)
    assert result.artifact is not None, result.failures
    report = Artifact.read(tmp_path / "out").manifest.freezing.reports["payloads/all.pt"]
    assert {item.name: item.kind for item in report.preserved} == {
        "version": "attribute",
        "reset": "method",
        **dict.fromkeys(("total", "last", "calls"), "attribute"),
    }
    assert "def reset(self)" in (tmp_path / "out" / "evidence" / "all-code.txt").read_text()


def test_errors_of_failed_attempts_are_files(tmp_path: Path) -> None:
    options = replace(QUICK_OPTIONS, recipes=["torchscript-frozen"])
    result = freeze(Branching().eval(), {"x": random_inputs(2, 4)}, out=tmp_path / "out", options=options)
    assert result.artifact is not None, result.failures
    (failed,) = [row for row in result.artifact.manifest.recipe.tried if "error" in row]
    assert failed["capture"] == "trace"
    result.artifact.verify((result.artifact.file(failed["error"]),))
    assert "Traceback" in (result.artifact.folder / failed["error"]).read_text()
