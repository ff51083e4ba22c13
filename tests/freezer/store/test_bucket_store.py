"""Stores in buckets, through real servers: layout, cache, failures and concurrent writers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact
from freezer.errors import (
    IntegrityError,
    NotPublishedError,
    StoreUnreachableError,
)
from freezer.files import buckets
from freezer.runtime.frozen_model import FrozenModel
from freezer.serving.verify import verify
from freezer.store import RemoteFiles, Store, Version
from tests.conftest import Frozen
from tests.support.buckets import Wire, cached_files, objects, overwrite
from tests.support.commands import together
from tests.support.steps import HERE, flip_a_byte, write_plain_artifact

V4 = "cpu-x86-64-v4"


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks settle soon on the loopback address, and what cannot be reached is not tried often."""
    monkeypatch.setattr("freezer.store.bucket.SETTLE_S", 0.1)
    monkeypatch.setattr("freezer.store.bucket.POLL_S", 0.05)
    monkeypatch.setattr(buckets, "ATTEMPTS", 2)


@pytest.fixture
def mlp(bucket: str, scripted: Frozen, portable: Frozen) -> str:
    """The URI of a store in a bucket that holds `mlp`."""
    made = [scripted.artifact, portable.artifact]
    Store.open(bucket).publish("mlp", source_key="key", artifacts=made)
    return bucket


def publish(store: Store, *artifacts: Artifact, key: str = "key") -> Version:
    decided = {artifact.manifest.device_class for artifact in artifacts}
    return store.publish("tiny", source_key=key, artifacts=artifacts, decided=decided)


def payload_of(place: str, artifact: Artifact, model: str = "tiny") -> str:
    digest = artifact.manifest.payloads[0].digest.removeprefix("sha256:")
    return f"{place}/{model}/blobs/sha256/{digest}"


def served(model: FrozenModel) -> str:
    assert model.manifest is not None
    return model.manifest.device_class


def place_of(uri: str) -> str:
    return uri.removeprefix("s3://")


# The same as in a folder


def test_a_bucket_equals_a_folder_byte_for_byte(
    bucket: str,
    s3_address: str,
    one: Artifact,
    two: Artifact,
    tmp_path: Path,
) -> None:
    local = Store.open(str(tmp_path / "store"), create=True)
    for store in (local, Store.open(bucket, create=True)):
        publish(store, one, two)
        assert publish(store, one, two).number == 1
        assert publish(store, one, key="other").number == 2
    in_folder = {
        str(path.relative_to(local.root)): path.read_bytes()
        for path in (local.root / "tiny").rglob("*")
        if path.is_file()
    }
    in_bucket = {
        name: content
        for name, content in objects(s3_address, place_of(bucket)).items()
        if name.startswith("tiny/")
    }
    assert in_bucket == in_folder
    assert list(objects(s3_address, place_of(bucket))) == list(in_bucket), "no lock is left"


def test_the_uri_sets_endpoint_and_region(
    bucket: str, s3_address: str, one: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(Store.open(bucket), one)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    uri = f"{bucket}?region=us-east-1&scheme=http&endpoint_override={s3_address.removeprefix('http://')}"
    assert Store.open(uri).version("tiny").number == 1
    assert Store.open(uri).uri == uri
    with pytest.raises(StoreUnreachableError):
        Store.open(f"{uri}&anonymous=true").version("tiny")


# Loading


def test_load_fetches_only_what_it_opens(mlp: str, tmp_path: Path, scripted: Frozen) -> None:
    x = torch.randn(2, 4)
    model = freezer.load("mlp", store=mlp)
    assert served(model) == HERE
    expected = freezer.load(scripted.artifact.folder)(x)
    assert torch.equal(model(x), expected)
    needed = {item.digest.removeprefix("sha256:") for item in scripted.artifact.manifest.contents}
    kept = cached_files(tmp_path / "cache")
    assert 0 < len(kept) < len(needed)
    assert {path.name for path in kept} <= needed, "no evidence"
    before = {path: path.stat().st_ino for path in kept}
    assert torch.equal(freezer.load("mlp:1", store=mlp)(x), expected)
    assert {path: path.stat().st_ino for path in cached_files(tmp_path / "cache")} == before, (
        "nothing was fetched again"
    )
    for path in kept:
        path.chmod(0o644)
        flip_a_byte(path)
    assert freezer.load("mlp", store=mlp).ladder == (), "damaged copies are fetched again"


def test_a_cache_that_cannot_be_written(
    mlp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreUnreachableError) as caught:
        freezer.load("mlp", store=mlp)
    assert caught.value.code == "CP-STORE-UNREACHABLE"


def test_corrupted_blobs_are_rejected(
    mlp: str, s3_address: str, scripted: Frozen, tmp_path: Path
) -> None:
    store, path = Store.open(mlp), payload_of(place_of(mlp), scripted.artifact, "mlp")
    overwrite(s3_address, path, bytes(scripted.artifact.manifest.payloads[0].size_bytes))
    with pytest.raises(IntegrityError):
        store.pull(store.version("mlp"), HERE, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    with pytest.raises(IntegrityError):
        verify("mlp", store=mlp, device_class=HERE)
    model = freezer.load("mlp", store=mlp)
    assert served(model) == "portable"
    assert [item.reason for item in model.ladder] == ["tampered"]
    assert Path(path).name not in {file.name for file in cached_files(tmp_path / "cache")}


@pytest.mark.parametrize("when", ["downloading", "downloaded"])
def test_the_cache_may_be_deleted_during_a_load(
    mlp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The best class serves, as if the cache had been there."""
    num_deleted = 0

    def delete(name: str) -> None:
        nonlocal num_deleted
        if name == when and num_deleted < 4:
            num_deleted += 1
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # other threads write

    chunks, local = RemoteFiles.chunks, RemoteFiles.local

    def chunks_then(self: RemoteFiles, path: str, limit: int, start: int = 0) -> Iterator[bytes]:
        yield from chunks(self, path, limit, start)
        if (tmp_path / "cache").exists():
            delete("downloading")

    def local_then(self: RemoteFiles, path: str, **kwargs: Any) -> Path:
        copy = local(self, path, **kwargs)
        delete("downloaded")
        return copy

    monkeypatch.setattr(RemoteFiles, "chunks", chunks_then)
    monkeypatch.setattr(RemoteFiles, "local", local_then)
    model = freezer.load("mlp", store=mlp)
    assert (served(model), model.ladder, num_deleted) == (HERE, (), 4)


# What cannot be reached


def test_unreachable_stores_fail_in_bounded_time(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreUnreachableError):
        Store.open("s3://none-such/models")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(StoreUnreachableError):
        Store.open(bucket)
    with pytest.raises(StoreUnreachableError):
        freezer.load("mlp", store=bucket)
    assert time.monotonic() - started < 30


# Faults and rivals


@pytest.mark.parametrize("cut_at", [1, 7])
def test_a_server_that_dies_leaves_no_half_version(
    bucket: str,
    s3_address: str,
    one: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut_at: int,
) -> None:
    first = publish(Store.open(bucket), one)
    newer = write_plain_artifact(tmp_path / "newer", b"newer")
    with Wire(s3_address) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.address)
        store = Store.open(bucket)
        wire.cut_at = cut_at
        with pytest.raises(StoreUnreachableError):
            publish(store, newer, key="new key")
        assert wire.num_written >= cut_at, "the last of them is index.json"
        wire.restore()
        assert store.versions("tiny") == [1]
        assert store.version("tiny") == first
        store.pull(first, "portable", tmp_path / "pulled").verify()
        monkeypatch.setattr(
            "freezer.store.bucket.EXPIRY_S", 0.3
        )  # the lock of the publisher that was cut off
        second = publish(store, newer, key="new key")
        assert second.number == 2
        assert (
            store.pull(second, "portable", tmp_path / "second").folder / "payloads/all.pt2"
        ).read_bytes() == b"newer"


PUBLISH = """
import sys
from pathlib import Path
from freezer.artifact.folder import Artifact
from freezer.store.artifact_store import Store
store, artifact = Store.open(sys.argv[1]), Artifact.read(Path(sys.argv[2]))
name = artifact.manifest.device_class
print("ready", flush=True)
sys.stdin.readline()
print(store.publish("tiny", source_key="key", artifacts=[artifact], decided={name}).number)
"""


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_concurrent_publishers_lose_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, one: Artifact, two: Artifact
) -> None:
    where = request.getfixturevalue("bucket") if kind == "bucket" else str(tmp_path / "store")
    store = Store.open(where, create=True)
    printed = together(PUBLISH, [[where, artifact.folder] for artifact in (one, two)])
    assert sorted(map(int, printed)) == [1, 2]
    assert store.versions("tiny") == [1, 2]
    assert sorted(store.version("tiny").images) == [V4, "portable"]


def test_objects_replaced_while_reading_are_read_whole(
    bucket: str, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's size is then another one than that of the bytes."""
    path, chunks = f"{place_of(bucket)}/tiny/index.json", RemoteFiles.chunks
    replacements = iter([b"longer than before", b"other"])

    def chunks_then(self: RemoteFiles, name: str, limit: int) -> Iterator[bytes]:
        yield from chunks(self, name, limit)
        for content in replacements:
            overwrite(s3_address, path, content)
            return

    overwrite(s3_address, path, b"first")
    monkeypatch.setattr(RemoteFiles, "chunks", chunks_then)
    assert Store.open(bucket).files.read("tiny/index.json") == b"other"


# Google


def test_a_store_in_a_google_bucket(
    gs: str, scripted: Frozen, portable: Frozen, one: Artifact, tmp_path: Path
) -> None:
    store = Store.open(gs)
    made = [scripted.artifact, portable.artifact]
    version = store.publish("mlp", source_key="key", artifacts=made)
    publish(store, one)
    assert store.models() == ["mlp", "tiny"]
    assert store.version("mlp") == version
    store.pull(version, HERE, tmp_path / "pulled").verify()
    assert served(freezer.load("mlp", store=gs)) == HERE
    with pytest.raises(NotPublishedError):
        store.version("none")
    with pytest.raises(StoreUnreachableError):
        Store.open(gs.replace("bucket/", "none/"))
