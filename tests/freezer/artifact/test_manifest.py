"""The manifest: golden files, and rejected ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import FORMAT_VERSION, DriftRecord, FreezingRecord, LatencyRecord, Manifest
from freezer.codec import encode
from freezer.errors import IntegrityError

GOLDEN = Path(__file__).parents[2] / "golden"


def full_manifest() -> Manifest:
    """A manifest with a value in every field, of every kind that the format knows."""
    return Manifest.from_bytes((GOLDEN / "manifest-full.json").read_bytes(), origin="golden")


def changed(**fields: object) -> bytes:
    return json.dumps(encode(full_manifest()) | fields).encode()


def test_manifests_are_written_as_before() -> None:
    """Changed bytes are a changed format: raise FORMAT_VERSION, and keep this file for the
    reader.
    """
    assert full_manifest().to_bytes() == (GOLDEN / "manifest-full.json").read_bytes()


def test_values_that_are_gone_are_read() -> None:
    """Manifests of earlier releases have sections and objectives that this one does not know."""
    data = json.loads((GOLDEN / "manifest-full.json").read_bytes())
    data["gate"]["objective"] = "load"
    data["freezing"]["migration"] = {"possible": True, "gain_ci": [1.25, 1.75]}
    manifest = Manifest.from_bytes(json.dumps(data).encode(), origin="golden")
    assert manifest.gate.objective == "load"
    assert manifest.freezing == full_manifest().freezing


def test_a_manifest_of_an_earlier_release_is_read() -> None:
    data = (GOLDEN / "manifest-v1.json").read_bytes()
    old = Manifest.from_bytes(data, origin="golden")
    assert old.latency == LatencyRecord(
        point={"batch": 1}, speedup=2.5, speedup_ci=(2.25, 2.75), ms={"p50": 1.5, "p99": None}
    )
    assert old.freezing == FreezingRecord(build_s=1.5, warnings=("one",))
    again, grown = json.loads(old.to_bytes()), ("recipe", "drift", "latency", "freezing")
    assert all(
        again[name] == value for name, value in json.loads(data).items() if name not in grown
    )


@pytest.mark.parametrize("number", range(1, FORMAT_VERSION + 1))
def test_every_format_has_a_golden_manifest(number: int) -> None:
    """The policy in docs/reference/contract.md: a release that raises FORMAT_VERSION keeps a reader
    and a manifest of each earlier format."""
    data = (GOLDEN / f"manifest-v{number}.json").read_bytes()
    assert json.loads(data)["format_version"] == number
    assert Manifest.from_bytes(data, origin="golden").payloads


def test_fields_of_later_releases_are_ignored() -> None:
    data = encode(full_manifest())
    for record in (
        data,
        data["payloads"][0],
        data["needs"],
        data["inputs"],
        data["latency"],
        data["freezing"],
    ):
        record["of a later release"] = {"any": [1, None]}
    assert Manifest.from_bytes(json.dumps(data).encode(), origin="later") == full_manifest()


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(full_manifest(), drift=DriftRecord(error_ratio=float("nan"))).to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "here is not JSON that Coldpress reads"),
        (b"[]", "here is not a Coldpress manifest"),
        (b"\xff\xfe", "here is not JSON that Coldpress reads"),
        (b'{"schemaVersion": 2}', "here is not a Coldpress manifest: it lacks 'format_version'"),
        (
            b'{"format_version": 2}',
            "here: format_version 2, this release reads 1; upgrade coldpress",
        ),
        (b'{"format_version": 1}', "here: the record lacks 'model'"),
        (changed(payloads=[{"path": "x"}]), "here: field 'payloads.0' lacks"),
        (changed(reference="eagre"), "here: field 'reference' is 'eagre'; expected one of"),
        (
            changed(drift={"margin": "wide"}),
            "here: field 'drift.margin' is 'wide'; expected",
        ),
    ],
)
def test_other_files_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Manifest.from_bytes(data, origin="here")
