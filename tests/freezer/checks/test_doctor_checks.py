"""Findings on stores in folders and buckets, and on hosts and limits of other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.checks import CheckRequest, Finding
from freezer.checks.machine_checks import check_store, classes_finding
from freezer.hardware import Host
from freezer.store import Store
from tests.support import hosts
from tests.support.buckets import objects
from tests.support.full_disks import full_disk
from tests.support.steps import copy_of, write_plain_artifact


def findings(uri: object) -> dict[str, Finding]:
    return {found.check: found for found in check_store(CheckRequest(store=str(uri)))}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return write_plain_artifact(tmp_path / "artifact")


@pytest.fixture
def folder(tmp_path: Path, artifact: Artifact) -> Path:
    """A store with one model."""
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="key", artifacts=[artifact])
    return store.root


def test_a_folder_is_left_unchanged(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    found = findings(folder)
    assert {item.level for item in found.values()} == {"ok"}
    assert found["store"].text == f"{folder}: 1 model, can be read and written"
    assert sorted(folder.rglob("*")) == before


def test_artifacts_without_their_engine_are_named(
    folder: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = tuple(replace(item, kind="onnxruntime") for item in artifact.manifest.payloads)
    fast = copy_of(artifact, folder.parent / "fast", payloads=payloads)
    Store.open(str(folder)).publish("fast", source_key="key", artifacts=[fast])
    assert "engines" not in findings(folder)
    monkeypatch.setattr("freezer.checks.machine_checks.find_spec", lambda _: None)
    found = findings(folder)["engines"]
    assert (found.level, found.remedy.split()[-1]) == ("warning", "onnxruntime")
    assert ("fast for " in found.text, "tiny" in found.text) == (True, False)


def test_a_bucket_is_left_unchanged(bucket: str, s3_address: str, artifact: Artifact) -> None:
    Store.open(bucket).publish("tiny", source_key="key", artifacts=[artifact])
    before = objects(s3_address, bucket.removeprefix("s3://"))
    assert {name: item.level for name, item in findings(bucket).items()} == {"store": "ok"}
    assert objects(s3_address, bucket.removeprefix("s3://")) == before


@pytest.mark.usefixtures("bucket")
def test_stores_that_cannot_be_reached(tmp_path: Path) -> None:
    for uri, remedy in (
        (str(tmp_path / "none"), f"ls -ld {tmp_path}/none"),
        ("s3://no-such-bucket/models", "aws s3 ls s3://no-such-bucket/models "),
        ("ftp://host/store", ""),
    ):
        found = findings(uri)["store"]
        assert (found.level, remedy in found.remedy) == ("error", True), found


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    with full_disk(tmp_path / "full") as folder:
        found = findings(folder)
        assert [path.name for path in folder.iterdir()] == ["ballast"]
    assert found["store"].level == "warning"
    assert "No space left" in found["store"].text
    assert found["store"].remedy.startswith(f"df -h {folder}")


@pytest.mark.parametrize(
    ("host", "environ", "level", "remedy"),
    [
        (hosts.CASCADE_LAKE, {}, "ok", ""),
        (hosts.CASCADE_LAKE, {"ATEN_CPU_CAPABILITY": "avx2"}, "warning", "unset ATEN_CPU"),
        (hosts.CASCADE_LAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "warning", "unset ONEDNN_MAX"),
        (hosts.IVY_BRIDGE, {}, "warning", "lscpu"),
    ],
)
def test_device_classes_and_their_limits(
    host: Host, environ: dict[str, str], level: str, remedy: str
) -> None:
    finding = classes_finding(host, environ)
    assert (finding.level, finding.remedy.startswith(remedy)) == (level, True)
