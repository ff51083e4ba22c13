"""The manifest: golden files, and rejected ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact.freezing_report import Change, FreezingReport, KeptTensor, PreservedName
from freezer.artifact.manifest import FileRef, Manifest, Payload
from freezer.artifact.sections import (
    CandidateRecord,
    ColdStart,
    DriftRecord,
    Dropped,
    EntrantRecord,
    FreezingRecord,
    LatencyRecord,
    Migration,
    Needs,
    PointFigures,
    RecipeRecord,
)
from freezer.codec import encode
from freezer.errors import IntegrityError
from freezer.hardware.cuda_requirements import CudaNeeds
from freezer.limits import SamplingPolicy
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import ConstantSpec, TensorSpec
from freezer.spec.outputs import OutputSpec, OutputStructure
from tests.steps import BATCH, manifest_of

DIGEST = f"sha256:{'ab' * 32}"
REPORT = FreezingReport(
    ops_before={"aten::relu": 2},
    ops_after={"aten::relu": 1},
    changes=(Change(name="fused", count=1),),
    num_constants=1,
    constants_bytes=8,
    constants=("a",),
    kept=(KeptTensor(name="b", reason="asked for"),),
    preserved=(PreservedName(name="b", kind="attribute", why="asked for"),),
    size_before_bytes=1,
    size_after_bytes=2,
    phases_s={"capture": 0.5},
)


def full_manifest() -> Manifest:
    """A manifest with a value in every field, of every kind that the format knows."""
    first = Payload(
        path="payloads/batch1.pt2",
        digest=DIGEST,
        size_bytes=10,
        kind="inductor",
        num_threads=2,
        dims=(Dim(name="batch", min=1, max=1),),
    )
    leaf = OutputStructure(kind="tensor")
    return manifest_of(
        first,
        payloads=(
            first,
            replace(first, path="payloads/all.pt2", size_bytes=12, dims=(BATCH,)),
            replace(first, path="payloads/all.pt", kind="torchscript", num_threads=None, convention="native"),
        ),
        files=(FileRef(path="golden/inputs.safetensors", digest=DIGEST, size_bytes=3, media_type="application/vnd.safetensors"),),
        inputs=InputSpec(
            inputs=(
                TensorSpec(name="ids", dtype="int64", shape=("batch", 7), range=(0, 99)),
                ConstantSpec(name="rate", value=16000),
                ConstantSpec(name="none", value=None),
            ),
            dims=(BATCH,),
            style="positional",
        ),
        outputs=(OutputSpec(name="logits", dtype="float32", rank=2), OutputSpec(name="states.0", dtype="bfloat16", rank=3)),
        structure=OutputStructure(
            kind="named",
            keys=("logits", "states", "loss"),
            items=(leaf, OutputStructure(kind="tuple", items=(leaf,)), OutputStructure(kind="constant", value=None)),
            type_name="transformers.modeling_outputs.Output",
        ),
        stateful=True,
        version=3,
        recipe=RecipeRecord(
            name="torchscript-frozen",
            capture="trace",
            lowering="torchscript",
            settings={"freeze": True, "precision": {"tf32": False}},
            tried=(
                {
                    "payload": "all",
                    "capture": "as-is",
                    "lowering": "torchscript",
                    "outcome": "not tried: the source is no TorchScript",
                },
            ),
            preserve=("hidden", "reset"),
            reset="reset",
        ),
        needs=Needs(torch="2.11", cuda=CudaNeeds(capability="9.0", runtime="12.8", driver="525.60.13", host="cpu-x86-64-v3")),
        drift=DriftRecord(
            error_ratio=1.25,
            max_abs_err=1e-7,
            sqnr_db=140.0,
            margin=2.4,
            task_metric={"eager": 0.5, "torchscript-frozen": None},
        ),
        latency=full_latency(),
        freezing=full_freezing(),
    )


def full_latency() -> LatencyRecord:
    first = PointFigures(
        num_threads=2,
        point={"batch": 1},
        payload="payloads/batch1.pt2",
        eager_p50=2.0,
        p50=1.5,
        p90=1.75,
        speedup=2.5,
        speedup_ci=(2.25, 2.75),
    )
    dynamic = replace(first, point={"batch": 4}, payload="payloads/all.pt2", eager_p50=4.0, speedup=None, speedup_ci=None)
    return LatencyRecord(
        point={"batch": 1},
        num_threads=2,
        eager_ms={"p50": 2.0, "p90": 2.5, "p99": None},
        ms={"p50": 1.5, "p90": 1.75, "p99": None},
        speedup=2.5,
        speedup_ci=(2.25, 2.75),
        num_samples={"eager": 100, "torchscript-frozen": 120},
        num_dropped_rounds=1,
        policy=SamplingPolicy(),
        cold_start=ColdStart(
            import_torch_ms=900.0,
            open_ms=10.0,
            first_call_ms=20.0,
            second_call_ms=1.0,
            memory_before_mb=238.0,
            memory_peak_mb=251.0,
        ),
        points=(first, dynamic),
        device={"timed_by": "device events"},
    )


def full_freezing() -> FreezingRecord:
    lost = EntrantRecord(recipe="inductor-frozen", problem="output 'y': error_ratio 41 > 3", speedup=None, error_ratio=41.0)
    return FreezingRecord(
        build_s=1.5,
        size_bytes=22,
        warnings=("one",),
        entrants=(EntrantRecord(recipe="torchscript-frozen", problem=None, speedup=2.5, error_ratio=1.25), lost),
        reports={"payloads/all.pt": REPORT},
        dropped=(Dropped(payload="payloads/batch4.pt2", num_threads=2, reason="no faster"),),
        strides_equal=True,
        candidates=(
            CandidateRecord(
                recipe=lost.recipe,
                problem=lost.problem,
                speedup=lost.speedup,
                error_ratio=lost.error_ratio,
                capture="export",
                lowering="inductor",
                build_s=9.5,
                size_bytes=3,
            ),
        ),
        failures={"inductor-unpacked": "no compiler"},
        migration=Migration(
            possible=True,
            recipe="inductor-frozen",
            against="torchscript-frozen",
            gain=1.5,
            gain_ci=(1.25, 1.75),
            max_abs_diff=1e-6,
        ),
    )


def test_manifests_are_read_and_written_as_before(golden: Callable[[str, bytes], bytes]) -> None:
    """A change here changes the format: raise FORMAT_VERSION, or run pytest --update-golden."""
    written = full_manifest().to_bytes()
    assert written == golden("manifest-full.json", written)
    assert Manifest.from_bytes(written, origin="golden") == full_manifest()


def test_a_manifest_of_an_earlier_release_is_read() -> None:
    data = (Path(__file__).parents[2] / "golden" / "manifest-v1.json").read_bytes()
    old = Manifest.from_bytes(data, origin="golden")
    assert old.latency == LatencyRecord(point={"batch": 1}, speedup=2.5, speedup_ci=(2.25, 2.75), ms={"p50": 1.5, "p99": None})
    assert old.freezing == FreezingRecord(build_s=1.5, warnings=("one",))
    again, grown = json.loads(old.to_bytes()), ("recipe", "drift", "latency", "freezing")
    assert all(again[name] == value for name, value in json.loads(data).items() if name not in grown)


def test_a_payload_accepts_sizes_within_its_dims() -> None:
    first, dynamic, _ = full_manifest().payloads
    assert [first.accepts({"batch": size}) for size in (1, 2)] == [True, False]
    assert [dynamic.accepts({"batch": size}) for size in (4, 5)] == [True, False]


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(full_manifest(), drift=DriftRecord(error_ratio=float("nan"))).to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "here is not a Coldpress manifest"),
        (b"[]", "here is not a Coldpress manifest"),
        (b"\xff\xfe", "here is not a Coldpress manifest"),
        (b'{"schemaVersion": 2}', "here is not a Coldpress manifest: 'format_version'"),
        (b'{"format_version": 2}', "here: format_version 2, this release reads 1; upgrade coldpress"),
        (b'{"format_version": 1}', "here: the record lacks 'device_class'"),
    ],
)
def test_other_files_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Manifest.from_bytes(data, origin="here")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inputs", {"style": "keyword", "dims": {}, "inputs": [{"name": "x", "dtype": "float33", "shape": [1]}]}),
        ("inputs", {"style": "keyword", "dims": {"n": {"min": 2, "max": 1}}, "inputs": []}),
        ("payloads", [{"path": "x"}]),
        ("payloads", 7),
        ("outputs", "text"),
    ],
)
def test_a_wrong_field_is_damage(field: str, value: Any) -> None:
    data = encode(full_manifest()) | {field: value}
    with pytest.raises(IntegrityError, match=f"here: field '{field}"):
        Manifest.from_bytes(json.dumps(data).encode(), origin="here")
