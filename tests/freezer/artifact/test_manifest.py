"""The manifest: a golden file that must stay readable, the round trip, and what a reader refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from freezer.artifact.manifest import FileRef, Manifest, Payload
from freezer.codec import encode
from freezer.errors import IntegrityError
from freezer.files.digest import digest_bytes
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import ConstantSpec, TensorSpec
from freezer.spec.outputs import OutputSpec, OutputStructure
from tests.steps import BATCH, manifest_of


def full_manifest() -> Manifest:
    """Something in every field, of every kind that the format knows."""
    digest = f"sha256:{'ab' * 32}"
    one = Dim(name="batch", min=1, max=1)
    common: dict[str, Any] = {"digest": digest, "kind": "inductor", "num_threads": 2}
    first = Payload(path="payloads/batch1.pt2", size_bytes=10, dims=(one,), **common)
    leaf = OutputStructure(kind="tensor")
    return manifest_of(
        first,
        payloads=(
            first,
            Payload(path="payloads/all.pt2", size_bytes=12, dims=(BATCH,), **common),
            replace(first, path="payloads/all.pt", kind="torchscript", num_threads=None, convention="native"),
        ),
        files=(FileRef(path="golden/inputs.safetensors", digest=digest, size_bytes=3, media_type="application/vnd.safetensors"),),
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
        latency={"point": {"batch": 1}, "speedup": 2.5, "speedup_ci": [2.25, 2.75], "ms": {"p50": 1.5, "p99": None}},
    )


def test_the_golden_manifest_is_still_read(golden: Callable[[str, bytes], bytes]) -> None:
    held = golden("manifest-v1.json", full_manifest().to_bytes())
    assert Manifest.from_bytes(held, origin="golden") == full_manifest()


def test_what_is_written_now_is_the_golden_manifest(golden: Callable[[str, bytes], bytes]) -> None:
    now = full_manifest().to_bytes()
    assert now == golden("manifest-v1.json", now), "the format changed: raise FORMAT_VERSION, or run pytest --update-golden"


def test_a_manifest_is_the_same_after_a_round_trip() -> None:
    for manifest in (full_manifest(), replace(full_manifest(), latency=None, version=None)):
        again = Manifest.from_bytes(manifest.to_bytes(), origin="here")
        assert again == manifest
        assert again.to_bytes() == manifest.to_bytes()


def test_contents_are_all_files() -> None:
    assert [item.path for item in full_manifest().contents] == [
        "payloads/batch1.pt2",
        "payloads/all.pt2",
        "payloads/all.pt",
        "golden/inputs.safetensors",
    ]


def test_a_payload_accepts_sizes_within_its_dims() -> None:
    first, dynamic, _ = full_manifest().payloads
    assert first.accepts({"batch": 1})
    assert not first.accepts({"batch": 2})
    assert dynamic.accepts({"batch": 4})
    assert not dynamic.accepts({"batch": 5})


def test_figures_that_json_lacks_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(full_manifest(), drift={"error_ratio": float("nan")}).to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "here is no Coldpress manifest"),
        (b"[]", "here is no Coldpress manifest"),
        (b"\xff\xfe", "here is no Coldpress manifest"),
        (b'{"schemaVersion": 2}', "here is no Coldpress manifest: 'format_version'"),
        (b'{"format_version": 2}', "here: format_version 2, this release reads 1; upgrade coldpress"),
        (b'{"format_version": 1}', "here: the record lacks 'device_class'"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Manifest.from_bytes(data, origin="here")


@pytest.mark.parametrize("field", sorted(encode(full_manifest()).keys() - {"freezing", "version"}))
def test_a_missing_field_is_named(field: str) -> None:
    data = encode(full_manifest())
    del data[field]
    with pytest.raises(IntegrityError, match=field):
        Manifest.from_bytes(json.dumps(data).encode(), origin="here")


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
def test_a_field_of_another_form_is_damage_not_misuse(field: str, value: Any) -> None:
    data = encode(full_manifest()) | {field: value}
    with pytest.raises(IntegrityError, match=f"here: field '{field}"):
        Manifest.from_bytes(json.dumps(data).encode(), origin="here")


def test_digests_are_sha256() -> None:
    assert digest_bytes(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
