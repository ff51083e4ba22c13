"""The store: OCI layout, versions, damage and crashes."""

from __future__ import annotations

import json
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Artifact, read_artifacts
from freezer.cli import store_commands
from freezer.codec import encode
from freezer.errors import IntegrityError, StoreUnreachableError, UsageError
from freezer.files import digest_bytes
from freezer.store import Descriptor, Store, Version, versions_of
from freezer.store.oci_layout import DEVICE_CLASS, OciImage
from tests.support.commands import finished
from tests.support.steps import blob_of, flip_a_byte, rewritten, write_plain_artifact

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"

PUBLISH = """
import sys
from pathlib import Path
from freezer.artifact.folder import Artifact
from freezer.store.artifact_store import Store
store, artifact = Store(Path(sys.argv[1])), Artifact.read(Path(sys.argv[2]))
"""


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


def publish(
    store: Store, *artifacts: Artifact, key: str = "key", carried: Sequence[Descriptor] = ()
) -> Version:
    return store.publish("tiny", source_key=key, artifacts=artifacts, carried=carried)


def blob(store: Store, descriptor: Any) -> Any:
    data = blob_of(store.root / "tiny", descriptor["digest"]).read_bytes()
    assert digest_bytes(data) == descriptor["digest"]
    assert len(data) == descriptor["size"]
    return json.loads(data)


# What is written


def test_the_layout_follows_the_contract(empty: Store, one: Artifact, two: Artifact) -> None:
    assert publish(empty, one, two) == empty.version("tiny:1")
    assert Artifact.read(one.folder).manifest.version is None, (
        "publishing leaves the folder unchanged"
    )
    folder = empty.root / "tiny"
    assert json.loads((folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    layout = json.loads((folder / "index.json").read_bytes())
    assert layout["schemaVersion"] == 2
    assert layout["mediaType"] == "application/vnd.oci.image.index.v1+json"
    tags = [
        item["annotations"]["org.opencontainers.image.ref.name"] for item in layout["manifests"]
    ]
    assert tags == ["1", "latest"]
    index = blob(empty, layout["manifests"][0])
    assert index["artifactType"] == "application/vnd.coldpress.frozen.v1"
    assert index["annotations"]["dev.coldpress.version"] == "1"
    found = {item["annotations"]["dev.coldpress.device-class"]: item for item in index["manifests"]}
    assert sorted(found) == [V4, "portable"]
    assert [item["platform"] for item in index["manifests"]] == [
        {"architecture": "amd64", "os": "linux"},
        {"architecture": "arm64", "os": "linux"},
        {"architecture": "amd64", "os": "linux", "variant": "v4"},
    ]
    assert index["manifests"][0]["digest"] == index["manifests"][1]["digest"]
    image = blob(empty, found[V4])
    assert (
        image["mediaType"] == found[V4]["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    )
    assert (
        image["artifactType"] == found[V4]["artifactType"] == "application/vnd.coldpress.frozen.v1"
    )
    assert image["config"]["mediaType"] == "application/vnd.coldpress.manifest.v1+json"
    assert blob(empty, image["config"])["version"] == 1
    assert [
        (layer["mediaType"], layer["annotations"]["org.opencontainers.image.title"])
        for layer in image["layers"]
    ] == [
        ("application/vnd.coldpress.payload.v1", "payloads/all.pt2"),
        ("application/vnd.safetensors", "golden/inputs.safetensors"),
    ]


def test_latest_rolls_back_until_the_next_version(
    empty: Store, one: Artifact, two: Artifact
) -> None:
    publish(empty, one)
    publish(empty, two, key="other")
    assert empty.roll_back("tiny", 1) == empty.version("tiny") == empty.version("tiny:1")
    assert empty.versions("tiny") == [1, 2]
    assert publish(empty, one, two, key="third").number == 3
    assert empty.version("tiny").number == 3
    with pytest.raises(UsageError):
        empty.roll_back("tiny", None)


def test_publishing_nothing_new_keeps_a_rollback(
    empty: Store, one: Artifact, two: Artifact
) -> None:
    publish(empty, one)
    newest = publish(empty, one, two)
    first = empty.roll_back("tiny", 1)
    assert publish(empty, carried=newest.index) == publish(empty, one, two) == newest
    assert empty.version("tiny") == first
    empty.roll_back("tiny", 2)
    assert publish(empty, carried=newest.index) == empty.version("tiny") == newest


def test_a_damaged_version_is_not_rolled_back_to(
    empty: Store, one: Artifact, two: Artifact
) -> None:
    first = publish(empty, one)
    publish(empty, one, two, key="other")
    config = empty.layout("tiny").image(first.images["portable"]).config
    flip_a_byte(blob_of(empty.root / "tiny", config.digest))
    with pytest.raises(IntegrityError):
        empty.roll_back("tiny", 1)
    assert empty.version("tiny").number == 2


def test_unchanged_images_are_carried_over(
    empty: Store, one: Artifact, two: Artifact, tmp_path: Path
) -> None:
    first = publish(empty, one, two)
    newer = write_plain_artifact(tmp_path / "newer", b"newer", device_class=V4)
    second = publish(empty, newer, carried=first.images_of("portable"))
    assert second.number == 2
    assert second.images["portable"] == first.images["portable"]
    assert second.images[V4] != first.images[V4]
    assert empty.manifest(second, "portable").version == 1, "the version it was first published in"
    assert empty.manifest(second, V4).version == 2
    assert empty.pull(second, "portable", tmp_path / "pulled").manifest.version == 1


def test_publish_rejects_a_damaged_artifact(empty: Store, one: Artifact) -> None:
    flip_a_byte(one.folder / "payloads/all.pt2")
    with pytest.raises(IntegrityError):
        publish(empty, one)
    assert empty.versions("tiny") == []


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", ".hidden", "a--b", "a b", "-a", "a:1"])
def test_publish_rejects_bad_names(empty: Store, one: Artifact, name: str) -> None:
    with pytest.raises(UsageError):
        empty.publish(name, source_key="key", artifacts=[one])


# What is read


def test_pull_restores_the_artifact(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version = publish(empty, one)
    pulled = empty.pull(version, "portable", tmp_path / "folder" / "pulled")
    assert (pulled.folder / "payloads/all.pt2").read_bytes() == b"one" * 1000
    assert pulled.manifest.version == 1
    assert stat.S_IMODE(pulled.folder.stat().st_mode) == 0o755
    assert [path.name for path in pulled.folder.parent.iterdir()] == ["pulled"], (
        "nothing else is left"
    )
    (pulled.folder / "payloads/all.pt2").write_bytes(b"mine")
    assert empty.pull(version, "portable", tmp_path / "again").folder.is_dir(), (
        "pulled files are copies"
    )


def test_pulling_again_keeps_the_folder(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version, dest = publish(empty, one), tmp_path / "dest"
    empty.pull(version, "portable", dest)
    inode = (dest / "payloads/all.pt2").stat().st_ino
    empty.pull(version, "portable", dest)
    assert (dest / "payloads/all.pt2").stat().st_ino == inode
    flip_a_byte(dest / "payloads/all.pt2")
    with pytest.raises(IntegrityError):
        empty.pull(version, "portable", dest)


def test_pull_keeps_foreign_folders(
    empty: Store, one: Artifact, two: Artifact, tmp_path: Path
) -> None:
    version, dest = publish(empty, one, two), tmp_path / "dest"
    dest.mkdir()
    (dest / "mine").write_text("mine")
    with pytest.raises(UsageError):
        empty.pull(version, "portable", dest)
    assert [path.name for path in dest.iterdir()] == ["mine"]
    (dest / "mine").unlink()
    empty.pull(version, "portable", dest)
    with pytest.raises(UsageError):
        empty.pull(version, V4, dest)


def test_uris_of_local_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a store").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for uri in (f"{tmp_path}/a store", f"file://{tmp_path}/a%20store", "file:a%20store"):
        assert Store.open(uri).root == tmp_path / "a store"
    with pytest.raises(StoreUnreachableError):
        Store.open(str(tmp_path / "none"))
    with pytest.raises(StoreUnreachableError):
        Store.open(str(tmp_path / "file" / "store"), create=True)
    for uri in ("file://folder/store", "ftp://host/store"):
        with pytest.raises(UsageError):
            Store.open(uri, create=True)


# Damage


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])],
    ids=["flip", "remove", "truncate"],
)
def test_pull_rejects_a_damaged_blob(
    empty: Store, one: Artifact, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    version = publish(empty, one)
    path = blob_of(empty.root / "tiny", one.manifest.payloads[0].digest)
    path.chmod(0o644)
    damage(path)
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError):
        empty.pull(version, "portable", tmp_path / "out" / "dest")
    assert list((tmp_path / "out").iterdir()) == []


def put(store: Store, data: bytes) -> Descriptor:
    digest = digest_bytes(data)
    blob_of(store.root / "tiny", digest).write_bytes(data)
    return Descriptor(digest=digest, size_bytes=len(data))


def test_paths_outside_the_folder_are_rejected(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version = publish(empty, one)
    manifest = empty.manifest(version, "portable")
    files = (replace(manifest.files[0], path="../../climbed"),)
    config = put(empty, replace(manifest, files=files).to_bytes())
    image = put(empty, json.dumps(encode(OciImage(config=config, layers=()))).encode())
    forged = replace(version, index=(replace(image, annotations={DEVICE_CLASS: "portable"}),))
    for read in (empty.pull, empty.materialize):
        with pytest.raises(IntegrityError):
            read(forged, "portable", tmp_path / "deep" / "dest")
    assert list(tmp_path.rglob("climbed")) == []


def test_digests_that_are_paths_are_rejected(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    path = empty.root / "tiny" / "index.json"
    path.write_text(path.read_text().replace("sha256:", "sha256:../../"))
    with pytest.raises(IntegrityError):
        empty.version("tiny")


# Faults

KILLED = (
    PUBLISH
    + """
import os, signal
replace = os.replace
def killed(source, dest):
    if Path(dest).name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, dest)
os.replace = killed
store.publish("tiny", source_key="new key", artifacts=[artifact])
"""
)


@pytest.mark.parametrize("moment", ["index.json", "payload"])
def test_a_crash_while_publishing_keeps_the_previous_version(
    empty: Store, one: Artifact, tmp_path: Path, moment: str
) -> None:
    """The publisher is killed at the moment when a file of that name would appear."""
    before = publish(empty, one)
    newer = write_plain_artifact(tmp_path / "newer", b"newer")
    name = (
        newer.manifest.payloads[0].digest.removeprefix("sha256:") if moment == "payload" else moment
    )
    done = finished(sys.executable, "-c", KILLED, empty.root, newer.folder, name)
    assert done.returncode == -signal.SIGKILL
    assert empty.versions("tiny") == [1]
    assert empty.version("tiny:1") == before
    empty.pull(before, "portable", tmp_path / "pulled").verify()
    again = publish(empty, newer, key="new key")
    assert again.number == 2
    assert (
        empty.pull(again, "portable", tmp_path / "again").folder / "payloads/all.pt2"
    ).read_bytes() == b"newer"


# Other tools


def needing_engine(folder: Path, content: bytes) -> Artifact:
    artifact = write_plain_artifact(folder, content)
    payloads = tuple(replace(item, kind="onnxruntime") for item in artifact.manifest.payloads)
    return rewritten(artifact, payloads=payloads)


def test_a_class_has_two_images(empty: Store, one: Artifact, tmp_path: Path) -> None:
    best = needing_engine(tmp_path / "best", b"best")
    version = publish(empty, best, one)
    assert [image.engines for image in version.images_of("portable")] == [("onnxruntime",), ()]
    assert version.images == {"portable": version.index[0]}
    assert publish(empty, best, one) == publish(empty, carried=version.index) == version
    assert len(versions_of(empty, "tiny")[0].artifacts) == 2
    for rank, artifact in enumerate((best, one)):
        pulled = empty.pull(version, "portable", tmp_path / f"pulled{rank}", rank=rank)
        assert pulled.manifest.payloads == artifact.manifest.payloads
    assert publish(empty, one, best).index == version.index[::-1]
    assert publish(empty, one).images_of("portable") == version.index[1:]
    assert empty.roll_back("tiny", 1) == version


def test_pull_writes_both_images(empty: Store, one: Artifact, tmp_path: Path) -> None:
    publish(empty, needing_engine(tmp_path / "best", b"best"), one)
    dest = tmp_path / "pulled"
    for _ in range(2):
        store_commands.pull("tiny", dest, store=empty.uri, device_class_="portable", every=True)
        both = read_artifacts(dest)
        assert [artifact.manifest.payloads[0].kind for artifact in both] == [
            "onnxruntime",
            "exported",
        ]
