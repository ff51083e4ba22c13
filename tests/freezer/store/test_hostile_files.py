"""Files of a store and of an artifact that others replaced by a FIFO, a socket, a folder or more
bytes than any document has: every reader ends at once with an error.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import freezer
from freezer.artifact import MANIFEST, SIGNATURE, Artifact, Signatures
from freezer.errors import ColdpressError, IntegrityError
from freezer.files import DOCUMENT_BYTES
from freezer.store import Store, newest_versions
from tests.support.buckets import overwrite
from tests.support.steps import blob_of, write_plain_artifact


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def expired(*_: object) -> None:
        raise AssertionError("a reader waits")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def listening(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # paths of sockets are limited to 108 characters
        made.bind(path.name)


def padded(path: Path) -> None:
    """Still valid JSON, in a sparse file."""
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b" ")
        file.truncate(DOCUMENT_BYTES + 1)
        file.seek(-1, os.SEEK_END)
        file.write(b" ")


ATTACKS = pytest.mark.parametrize("attack", [fifo, folder, listening, padded])


def files_of(store: Store, artifact: Artifact) -> dict[str, Path]:
    """Files that are read before any signature is checked."""
    layout, version = store.layout("tiny"), store.version("tiny")
    (image,) = version.index
    digests = {
        "index": layout.tags()["1"].digest,
        "image": image.digest,
        "manifest": layout.image(image).config.digest,
        "payload": artifact.manifest.payloads[0].digest,
    }
    files = {name: blob_of(store.root / "tiny", digest) for name, digest in digests.items()}
    return {"index.json": store.root / "tiny" / "index.json", **files}


@ATTACKS
@pytest.mark.parametrize("name", ["index.json", "index", "image", "manifest", "payload"])
def test_stores(
    tmp_path: Path,
    one: Artifact,
    name: str,
    attack: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="key", artifacts=[one])
    store.publish("other", source_key="key", artifacts=[one])
    attack(files_of(store, one)[name])
    with pytest.raises(IntegrityError):
        store.pull(store.version("tiny"), "portable", tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    with pytest.raises(ColdpressError) as caught:
        freezer.load("tiny", store=store.uri)
    assert caught.value.code in ("CP-INTEGRITY", "CP-INCOMPATIBLE")
    listed, errors = newest_versions(store)
    assert "other" in [version.model for version in listed]
    assert all(isinstance(error, IntegrityError) for error in errors)


@ATTACKS
@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE])
def test_artifact_folders(
    tmp_path: Path, name: str, attack: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    artifact = write_plain_artifact(tmp_path / "artifact")
    (artifact.folder / SIGNATURE).write_bytes(Signatures(image=b"{}", signed=()).to_bytes())
    attack(artifact.folder / name)
    read = Artifact.read if name == MANIFEST else Signatures.read
    with pytest.raises(IntegrityError):
        read(artifact.folder)


def test_a_lock_that_is_a_fifo(tmp_path: Path, one: Artifact) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="key", artifacts=[one])
    fifo(store.root / ".coldpress" / "locks" / "tiny")
    with pytest.raises(ColdpressError):
        store.publish("tiny", source_key="other", artifacts=[one])


def test_objects_of_a_bucket_are_bounded(bucket: str, s3_address: str, one: Artifact) -> None:
    store, place = Store.open(bucket), bucket.removeprefix("s3://")
    version = store.publish("tiny", source_key="key", artifacts=[one])
    assert store.remote is not None
    payload = one.manifest.payloads[0]
    name = f"tiny/blobs/sha256/{payload.digest.removeprefix('sha256:')}"
    overwrite(s3_address, f"{place}/{name}", bytes(payload.size_bytes + 1))
    with pytest.raises(IntegrityError):
        list(store.remote.chunks(name, payload.size_bytes))
    with pytest.raises(IntegrityError):
        store.file(version, payload)
    index = store.remote.read("tiny/index.json")
    overwrite(s3_address, f"{place}/tiny/index.json", index.ljust(DOCUMENT_BYTES + 1))
    with pytest.raises(IntegrityError):
        store.version("tiny")
