"""The store: an OCI layout that other tools read, versions that count up, and readers that never see half of one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact.folder import Artifact
from freezer.errors import IntegrityError, NotPublishedError, StoreUnreachableError, UsageError
from freezer.files.digest import digest_bytes
from freezer.store.store import Store, Version
from tests.steps import flip_a_byte, rewritten, write_plain_artifact

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"

PUBLISH = """
import sys
from pathlib import Path
from freezer.artifact.folder import Artifact
from freezer.store.store import Store
store, artifact = Store(Path(sys.argv[1])), Artifact.read(Path(sys.argv[2]))
"""


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def one(tmp_path: Path) -> Artifact:
    return write_plain_artifact(tmp_path / "one", b"one" * 1000)


@pytest.fixture
def two(tmp_path: Path) -> Artifact:
    return write_plain_artifact(tmp_path / "two", b"two" * 1000, device_class=V4)


def publish(store: Store, *artifacts: Artifact, key: str = "key", carried: Any = None) -> Version:
    made = {artifact.manifest.device_class: artifact for artifact in artifacts}
    return store.publish("tiny", source_key=key, artifacts=made, carried=carried or {})


def blob(store: Store, descriptor: Any) -> Any:
    data = (store.root / "tiny" / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
    assert digest_bytes(data) == descriptor["digest"]
    assert len(data) == descriptor["size"]
    return json.loads(data)


# What is written


def test_the_layout_is_what_the_contract_says(empty: Store, one: Artifact, two: Artifact) -> None:
    publish(empty, one, two)
    folder = empty.root / "tiny"
    assert json.loads((folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    layout = json.loads((folder / "index.json").read_bytes())
    assert layout["schemaVersion"] == 2
    assert layout["mediaType"] == "application/vnd.oci.image.index.v1+json"
    tags = [item["annotations"]["org.opencontainers.image.ref.name"] for item in layout["manifests"]]
    assert tags == ["1", "latest"]
    index = blob(empty, layout["manifests"][0])
    assert index["artifactType"] == "application/vnd.coldpress.frozen.v1"
    assert index["annotations"]["dev.coldpress.version"] == "1"
    found = {item["annotations"]["dev.coldpress.device-class"]: item for item in index["manifests"]}
    assert sorted(found) == [V4, "portable"]
    assert found[V4]["platform"] == {"architecture": "amd64", "os": "linux"}
    assert "platform" not in found["portable"]
    image = blob(empty, found[V4])
    assert image["mediaType"] == found[V4]["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert image["artifactType"] == found[V4]["artifactType"] == "application/vnd.coldpress.frozen.v1"
    assert image["config"]["mediaType"] == "application/vnd.coldpress.manifest.v1+json"
    assert blob(empty, image["config"])["version"] == 1
    assert [(layer["mediaType"], layer["annotations"]["org.opencontainers.image.title"]) for layer in image["layers"]] == [
        ("application/vnd.coldpress.payload.v1", "payloads/all.pt2"),
        ("application/vnd.safetensors", "golden/inputs.safetensors"),
    ]


def test_versions_count_up_and_latest_is_the_newest(empty: Store, one: Artifact, two: Artifact) -> None:
    assert empty.versions("tiny") == []
    assert publish(empty, one).number == 1
    assert publish(empty, one, key="other").number == 2
    for _ in range(9):
        publish(empty, one, key=f"key {empty.versions('tiny')}")
    assert empty.versions("tiny") == list(range(1, 12))
    assert empty.version("tiny").number == empty.version("tiny:latest").number == 11
    assert empty.version("tiny:2").source_key == "other"
    assert empty.models() == ["tiny"]


def test_the_same_again_is_no_new_version(empty: Store, one: Artifact, two: Artifact) -> None:
    first = publish(empty, one, two)
    before = {path: path.stat().st_mtime_ns for path in (empty.root / "tiny").rglob("*") if path.is_file()}
    again = publish(empty, one, two)
    assert again == first
    index = empty.root / "tiny" / "index.json"
    assert index.stat().st_mtime_ns == before[index]
    assert {path for path in (empty.root / "tiny").rglob("*") if path.is_file()} == set(before)


def test_a_version_as_published_is_the_version_as_read(empty: Store, one: Artifact, two: Artifact) -> None:
    assert publish(empty, one, two) == empty.version("tiny:1")


def test_unchanged_images_are_carried_over(empty: Store, one: Artifact, two: Artifact, tmp_path: Path) -> None:
    first = publish(empty, one, two)
    newer = write_plain_artifact(tmp_path / "newer", b"newer", device_class=V4)
    second = publish(empty, newer, carried={"portable": first.images["portable"]})
    assert second.number == 2
    assert second.images["portable"] == first.images["portable"]
    assert second.images[V4] != first.images[V4]
    assert empty.manifest(second, "portable").version == 1, "the version it was first published in"
    assert empty.manifest(second, V4).version == 2
    assert empty.pull(second, "portable", tmp_path / "pulled").manifest.version == 1


def test_publishing_leaves_the_artifacts_folder_as_it_is(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    Artifact.read(one.folder).verify()
    assert Artifact.read(one.folder).manifest.version is None


def test_a_damaged_artifact_is_not_published(empty: Store, one: Artifact) -> None:
    flip_a_byte(one.folder / "payloads/all.pt2")
    with pytest.raises(IntegrityError, match="changed or damaged"):
        publish(empty, one)
    assert empty.versions("tiny") == []


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", ".hidden", "a--b", "a b", "-a", "a:1"])
def test_names_are_oci_names(empty: Store, one: Artifact, name: str) -> None:
    with pytest.raises(UsageError, match="a name must match"):
        empty.publish(name, source_key="key", artifacts={"portable": one}, carried={})


@pytest.mark.parametrize("name", ["a", "resnet50", "bert-base.v2_x"])
def test_good_names_are_taken(empty: Store, one: Artifact, name: str) -> None:
    assert empty.publish(name, source_key="key", artifacts={"portable": one}, carried={}).model == name


# What is read


def test_an_artifact_comes_back_as_it_was(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version = publish(empty, one)
    pulled = empty.pull(version, "portable", tmp_path / "folder" / "pulled")
    assert (pulled.folder / "payloads/all.pt2").read_bytes() == b"one" * 1000
    assert pulled.manifest.version == 1
    assert stat.S_IMODE(pulled.folder.stat().st_mode) == 0o755
    assert [path.name for path in pulled.folder.parent.iterdir()] == ["pulled"], "nothing else is left"
    (pulled.folder / "payloads/all.pt2").write_bytes(b"mine")
    assert empty.pull(version, "portable", tmp_path / "again").folder.is_dir(), "a pulled file is no part of the store"


def test_pulling_again_keeps_what_is_there(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version, dest = publish(empty, one), tmp_path / "dest"
    empty.pull(version, "portable", dest)
    inode = (dest / "payloads/all.pt2").stat().st_ino
    empty.pull(version, "portable", dest)
    assert (dest / "payloads/all.pt2").stat().st_ino == inode
    flip_a_byte(dest / "payloads/all.pt2")
    with pytest.raises(IntegrityError, match="changed or damaged"):
        empty.pull(version, "portable", dest)


def test_a_folder_that_holds_something_else_is_left_alone(empty: Store, one: Artifact, two: Artifact, tmp_path: Path) -> None:
    version, dest = publish(empty, one, two), tmp_path / "dest"
    dest.mkdir()
    (dest / "mine").write_text("mine")
    with pytest.raises(UsageError, match="is not empty; name a new folder with --dest"):
        empty.pull(version, "portable", dest)
    assert [path.name for path in dest.iterdir()] == ["mine"]
    (dest / "mine").unlink()
    empty.pull(version, "portable", dest)
    with pytest.raises(UsageError, match="is not empty"):
        empty.pull(version, V4, dest)


def test_what_is_not_published_is_named_with_what_is(empty: Store, one: Artifact) -> None:
    with pytest.raises(NotPublishedError, match=r"model 'tiny' is not in store .*; published are: none"):
        empty.version("tiny")
    version = publish(empty, one)
    with pytest.raises(NotPublishedError, match="published are: tiny"):
        empty.version("other")
    with pytest.raises(NotPublishedError, match=r"has no version '7' .*it has: 1, latest"):
        empty.version("tiny:7")
    with pytest.raises(NotPublishedError, match="tiny:1 has no artifact for cpu-x86-64-v3; it has: portable"):
        empty.manifest(version, V3)
    with pytest.raises(NotPublishedError, match="is no model's name"):
        empty.version("../tiny")


def test_a_store_is_a_folder_or_a_file_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a store").mkdir()
    assert Store.open(f"{tmp_path}/a store").root == tmp_path / "a store"
    assert Store.open(f"file://{tmp_path}/a%20store").root == tmp_path / "a store"
    monkeypatch.chdir(tmp_path)
    assert Store.open("file:a%20store").root == tmp_path / "a store"
    with pytest.raises(UsageError, match="names the host 'folder'"):
        Store.open("file://folder/store", create=True)
    with pytest.raises(UsageError, match="scheme 'ftp' is none of a store; name a local folder, s3:// or gs://"):
        Store.open("ftp://host/store")


def test_a_store_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachableError, match="is not there"):
        Store.open(str(tmp_path / "none"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnreachableError, match="cannot be made"):
        Store.open(str(tmp_path / "file" / "store"), create=True)


# Damage


def payload_blob(store: Store, artifact: Artifact) -> Path:
    digest = artifact.manifest.payloads[0].digest.removeprefix("sha256:")
    return store.root / "tiny" / "blobs" / "sha256" / digest


def damage_flip(path: Path) -> None:
    flip_a_byte(path)


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_remove])
def test_a_damaged_blob_is_found_and_nothing_is_left_behind(empty: Store, one: Artifact, tmp_path: Path, damage: Any) -> None:
    version = publish(empty, one)
    path = payload_blob(empty, one)
    if damage is damage_truncate:
        path.chmod(0o644)
    damage(path)
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError, match="damaged"):
        empty.pull(version, "portable", tmp_path / "out" / "dest")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("which", ["config", "image", "index"])
def test_damaged_json_is_found(empty: Store, one: Artifact, tmp_path: Path, which: str) -> None:
    version = publish(empty, one)
    descriptor = json.loads((empty.root / "tiny" / "index.json").read_bytes())["manifests"][0]
    if which != "index":
        descriptor = blob(empty, descriptor)["manifests"][0]
    if which == "config":
        descriptor = blob(empty, descriptor)["config"]
    flip_a_byte(empty.root / "tiny" / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:"))
    with pytest.raises(IntegrityError, match="does not have the digest it is named by"):
        empty.manifest(empty.version("tiny") if which == "index" else version, "portable")


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"manifests": [7]}'])
def test_a_damaged_index_is_no_traceback(empty: Store, one: Artifact, content: bytes) -> None:
    publish(empty, one)
    (empty.root / "tiny" / "index.json").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"index\.json is (damaged|no OCI index)"):
        empty.version("tiny")


def test_an_untagged_entry_of_another_tool_is_passed_over(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    path = empty.root / "tiny" / "index.json"
    layout = json.loads(path.read_bytes())
    layout["manifests"].append({k: v for k, v in layout["manifests"][0].items() if k != "annotations"})
    path.write_text(json.dumps(layout))
    assert empty.version("tiny").number == 1


def test_a_title_that_climbs_is_refused(empty: Store, one: Artifact, tmp_path: Path) -> None:
    version = publish(empty, one)
    image = blob(empty, version.images["portable"])
    image["layers"][0]["annotations"]["org.opencontainers.image.title"] = "../../climbed"
    data = json.dumps(image).encode()
    (empty.root / "tiny" / "blobs" / "sha256" / digest_bytes(data).removeprefix("sha256:")).write_bytes(data)
    forged = Version(
        model="tiny", number=1, source_key="key", images={"portable": {"digest": digest_bytes(data), "size": len(data)}}
    )
    for read in (empty.pull, empty.materialize):
        with pytest.raises(IntegrityError, match=r"names '\.\./\.\./climbed', which is outside the artifact's folder"):
            read(forged, "portable", tmp_path / "deep" / "dest")
    assert list(tmp_path.rglob("climbed")) == []


def test_a_digest_that_is_a_path_is_refused(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    forged = Version(model="tiny", number=1, source_key="key", images={"portable": {"digest": "sha256:../../index.json"}})
    with pytest.raises(IntegrityError, match="is no sha256 digest"):
        empty.manifest(forged, "portable")


# Faults

MIN_KILLS, MAX_KILLS = 5, 40


def killed_when_replacing(name: str, store: Store, artifact: Artifact, key: str) -> None:
    """Publish in a process that is killed at the very moment a file of that name would appear."""
    code = (
        PUBLISH
        + """
import os, signal
replace = os.replace
def killed(source, dest):
    if Path(dest).name == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, dest)
os.replace = killed
store.publish("tiny", source_key=sys.argv[3], artifacts={"portable": artifact}, carried={})
"""
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root), str(artifact.folder), key, name], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["index.json", "payload"])
def test_a_crash_in_mid_publish_leaves_the_version_before(empty: Store, one: Artifact, tmp_path: Path, moment: str) -> None:
    first = publish(empty, one)
    newer = write_plain_artifact(tmp_path / "newer", b"newer")
    name = newer.manifest.payloads[0].digest.removeprefix("sha256:") if moment == "payload" else moment
    killed_when_replacing(name, empty, newer, "new key")
    assert empty.versions("tiny") == [1]
    assert empty.version("tiny") == first
    empty.pull(first, "portable", tmp_path / "pulled").verify()
    second = publish(empty, newer, key="new key")
    assert second.number == 2
    assert (empty.pull(second, "portable", tmp_path / "second").folder / "payloads/all.pt2").read_bytes() == b"newer"


def test_a_crash_in_the_first_publish_leaves_no_model(empty: Store, one: Artifact) -> None:
    killed_when_replacing("index.json", empty, one, "key")
    assert empty.models() == []
    with pytest.raises(NotPublishedError, match="is not in store"):
        empty.version("tiny")
    assert publish(empty, one).number == 1


def test_kills_at_any_moment_leave_whole_versions(empty: Store, one: Artifact, tmp_path: Path) -> None:
    code = (
        PUBLISH
        + """
import itertools
print("ready", flush=True)
for count in itertools.count():
    store.publish("tiny", source_key=f"{sys.argv[3]} {count}", artifacts={"portable": artifact}, carried={})
"""
    )
    started = time.monotonic()
    publish(empty, one, key="timed")
    took_s = time.monotonic() - started
    moments = random.Random(0)
    for attempt in range(MAX_KILLS):
        if attempt >= MIN_KILLS and len(empty.versions("tiny")) > MIN_KILLS:
            break  # some were killed early, and some after they had published
        command = [sys.executable, "-c", code, str(empty.root), str(one.folder), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.2, 4) * took_s)
            child.kill()
        versions = empty.versions("tiny")
        assert versions == list(range(1, len(versions) + 1))
        latest = empty.version("tiny")
        assert latest.number == versions[-1]
        empty.pull(latest, "portable", tmp_path / f"pulled-{attempt}").verify()
    assert len(empty.versions("tiny")) > MIN_KILLS, "a disk that is slow beyond all bounds, or nothing is published any more"


def test_two_processes_that_publish_at_once_get_versions_of_their_own(empty: Store, one: Artifact) -> None:
    code = (
        PUBLISH
        + """
sys.stdin.readline()
for count in range(5):
    version = store.publish("tiny", source_key=f"{sys.argv[3]} {count}", artifacts={"portable": artifact}, carried={})
    print(version.number)
"""
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(empty.root), str(one.folder), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in "ab"
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
    numbers = [int(number) for child in children for number in child.communicate()[0].split()]
    assert sorted(numbers) == list(range(1, 11))
    assert empty.versions("tiny") == list(range(1, 11))
    assert len({empty.version(f"tiny:{number}").source_key for number in numbers}) == 10


def test_a_store_that_cannot_be_written_is_unreachable_and_unchanged(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    blobs = empty.root / "tiny" / "blobs"
    shutil.move(blobs, empty.root / "kept")
    blobs.write_text("a file where a folder should be")
    with pytest.raises(StoreUnreachableError, match="cannot be written"):
        publish(empty, one, key="other")
    blobs.unlink()
    shutil.move(empty.root / "kept", blobs)
    assert empty.versions("tiny") == [1]


# Other tools


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_reads_and_copies_a_model(empty: Store, one: Artifact, two: Artifact, tmp_path: Path) -> None:
    publish(empty, one, two)
    source = f"oci:{empty.root / 'tiny'}"
    raw = subprocess.run(["skopeo", "inspect", "--raw", f"{source}:latest"], capture_output=True, check=True).stdout
    assert {item["annotations"]["dev.coldpress.device-class"] for item in json.loads(raw)["manifests"]} == {V4, "portable"}
    copied = Store.open(str(tmp_path / "copied"), create=True)
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    copy = ["skopeo", "--policy", str(policy), "copy", "--quiet", "--all"]
    subprocess.run([*copy, f"{source}:latest", f"oci:{copied.root / 'tiny'}:latest"], check=True)
    version = copied.version("tiny")
    assert version.number == 1
    for name, artifact in (("portable", one), (V4, two)):
        pulled = copied.pull(version, name, tmp_path / name)
        assert pulled.manifest.payloads == artifact.manifest.payloads


def test_a_manifest_of_another_version_is_a_version_of_its_own(empty: Store, one: Artifact) -> None:
    publish(empty, one)
    changed = rewritten(one, provenance={"source": "elsewhere"})
    assert publish(empty, changed).number == 2
