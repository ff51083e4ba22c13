"""Freeze end to end: what it writes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import freezer
from freezer.artifact import Artifact, GateRecord
from freezer.errors import ColdpressError, JudgeError, SpecError, UsageError
from freezer.spec import Limits
from tests.conftest import Frozen
from tests.support.models import AttributeCounter, mlp, seeded
from tests.support.steps import BATCH, HERE, quickly, random_inputs

X = random_inputs(2, 4)


@pytest.mark.parametrize("which", ["inductor", "scripted", "portable"])
def test_folder_is_complete_and_serves(which: str, request: pytest.FixtureRequest) -> None:
    frozen: Frozen = request.getfixturevalue(which)
    artifact = Artifact.read(frozen.artifact.folder)
    assert artifact.manifest == frozen.artifact.manifest
    artifact.verify()
    written = {
        str(path.relative_to(artifact.folder))
        for path in artifact.folder.rglob("*")
        if path.is_file()
    }
    assert written == {"manifest.json", *(item.path for item in artifact.manifest.contents)}
    assert written >= {
        "evidence/latency.parquet",
        "evidence/drift.parquet",
        "golden/inputs.safetensors",
        "golden/outputs.safetensors",
    }
    assert list(artifact.folder.parent.iterdir()) == [artifact.folder], "no staging folder is left"
    model = freezer.load(artifact.folder)
    for batch in (1, 2, 4):
        x = random_inputs(batch, *([3, 16, 16] if which == "inductor" else [4]), seed=batch)
        torch.testing.assert_close(model(x), frozen.model(x))


def test_manifest_records_the_judgement(inductor: Frozen) -> None:
    manifest: Any = inductor.artifact.manifest
    judgement: Any = inductor.result.judgement
    winner = judgement.winner
    assert manifest.recipe.name == "inductor-frozen"
    assert (manifest.device_class, manifest.verdict) == (HERE, "published")
    assert (manifest.reference, manifest.drift.error_ratio) == (
        "float64",
        winner.drift.measured.error_ratio,
    )
    assert manifest.gate == GateRecord(error_ratio_max=3.0, speedup_min=0.0)
    assert manifest.latency.speedup_ci == (winner.speedup.low, winner.speedup.high)
    assert manifest.latency.cold_start is not None
    assert manifest.provenance["source"] == "tests.support.models.TinyConv"
    assert manifest.provenance["weights"] == winner.candidate.weights
    assert [item.point["batch"] for item in manifest.golden] == [2, 1, 4, 3]


def test_evidence_has_every_sample_and_row(scripted: Frozen) -> None:
    judgement: Any = scripted.result.judgement
    evidence = scripted.artifact.folder / "evidence"
    latency = pq.read_table(evidence / "latency.parquet").to_pylist()
    for name in ("eager", "torchscript-frozen"):
        rows = [row for row in latency if (row["entrant"], row["point"]) == (name, "batch=1")]
        assert [row["latency_ms"] for row in rows] == judgement.sampling.pooled(name)
    drift = pq.read_table(evidence / "drift.parquet").to_pylist()
    expected = [row.error_ratio for row in judgement.trials[0].drift.rows]
    assert [row["error_ratio"] for row in drift] == expected
    assert {row["kind"] for row in drift} == {"single", "sequence"}


def test_golden_outputs_are_the_reference(portable: Frozen) -> None:
    inputs, outputs = (
        load_file(portable.artifact.folder / f"golden/{name}.safetensors")
        for name in ("inputs", "outputs")
    )
    wide = seeded(type(portable.model)).double()
    for index, item in enumerate(portable.artifact.manifest.golden):
        expected = wide(inputs[f"{index}/x"].double()).float()
        assert torch.equal(outputs[f"{index}/output"], expected)
        assert 0 < item.native_rmse["output"] < 1e-6


class Late(AttributeCounter):
    """Answers otherwise from the third call on, which only a sequence of calls shows."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < 3 else -x


def test_rejected_model_leaves_evidence_alone(tmp_path: Path) -> None:
    model = Late().eval()
    result: Any = quickly(model, {"x": X}, tmp_path / "out", device_class="portable")
    assert (result.verdict, result.artifact) == ("rejected", None)
    evidence = tmp_path / "out.evidence"
    assert list(tmp_path.iterdir()) == [result.evidence] == [evidence]
    rows = pq.read_table(evidence / "portable" / "drift.parquet").to_pylist()
    expected = [row.problem for row in result.judgement.trials[0].drift.rows]
    assert [row["problem"] for row in rows] == expected
    assert list((evidence / "portable" / "portable").glob("*.txt")), "the captured code"
    assert model.calls == 0


def test_own_files_beside_the_evidence_survive(tmp_path: Path) -> None:
    """A freeze replaces the evidence of its class and of `portable`, and removes nothing else in
    the folder.
    """
    evidence = tmp_path / "out.evidence"
    own, earlier = (
        [evidence / "notes.txt", evidence / "plots" / "drift.png"],
        evidence / "portable" / "drift.parquet",
    )
    for path in (*own, earlier):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("own")
    assert quickly(mlp(), {"x": X}, tmp_path / "out", device_class="portable").artifact is not None
    assert [path.read_text() for path in own] == ["own", "own"]
    assert not earlier.exists()


def test_kept_eager_writes_the_portable_program(tmp_path: Path) -> None:
    lines: list[str] = []
    limits = Limits(speedup_min=1e6)
    result = quickly(mlp(), {"x": X}, tmp_path / "out", limits=limits, progress=lines.append)
    assert any("portable" in line for line in lines)
    assert result.verdict == "kept-eager"
    assert result.reason.endswith("the portable program serves")
    assert result.artifact is not None
    assert result.artifact.manifest.device_class == "portable"


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ({"x": X}, {"device_class": "cpu-z80"}, UsageError, "unknown device class"),
        ({"x": {1, 2}}, {}, SpecError, "input 'x': got a set"),
        ({"y": X}, {}, SpecError, r"input 'y' is not a parameter of forward\(x\)"),
        ({"x": X}, {"dims": {"y": {0: BATCH}}}, SpecError, "unknown tensor input 'y'"),
        ({"x": X}, {"dims": {"x": {7: BATCH}}}, SpecError, "input 'x' has no axis 7"),
        ({"x": X}, {"dims": {"x": {0: replace(BATCH, min=3)}}}, SpecError, "dim 'batch' is 2"),
        (
            {"x": X, "y": X},
            {"dims": {"x": {0: BATCH}, "y": {0: replace(BATCH, max=9)}}},
            SpecError,
            "two different bounds",
        ),
        (
            {"x": X},
            {"dims": {"x": {0: BATCH}}, "points": [{"batch": 9}]},
            ColdpressError,
            "expected batch from 1 to 4",
        ),
        ({"x": X.reshape(4, 2)}, {}, JudgeError, "the eager model fails on its inputs"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, inputs: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quickly(mlp(), inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
