"""Stores in registries, through Debian's docker-registry over TLS: copies, pins, cache, faults."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import freezer
from freezer.artifact import Artifact
from freezer.errors import (
    IncompatibleError,
    IntegrityError,
    NotPublishedError,
    StoreUnreachableError,
    UsageError,
)
from freezer.files import DOCUMENT_BYTES, digest_bytes
from freezer.files.download import login_of
from freezer.store import Store, copy_version, newest_versions, references, versions_of
from freezer.store.cache import BlobCache
from tests.support.buckets import cached_files
from tests.support.commands import finished, together
from tests.support.keys import make_pair
from tests.support.registries import (
    SECRET,
    USER,
    Answer,
    Front,
    RunningRegistry,
    front_of,
    write_login,
)
from tests.support.steps import write_plain_artifact

BIG_BYTES = 40_000_000


@pytest.fixture
def folder(tmp_path: Path, one: Artifact, two: Artifact) -> Store:
    """A store in a folder with two versions of `tiny`, the second signed."""
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="key", artifacts=[one])
    store.publish("tiny", source_key="other", artifacts=[one, two])
    sign(store, tmp_path, "own")
    return store


@pytest.fixture
def big(tmp_path: Path, front: Front) -> str:
    """A store behind the front with a payload of several parts."""
    store = Store.open(str(tmp_path / "big"), create=True)
    payload = os.urandom(BIG_BYTES)
    artifact = write_plain_artifact(tmp_path / "big-artifact", payload)
    store.publish("tiny", source_key="key", artifacts=[artifact])
    uri = front.uri("big/models")
    copy_version(store, Store.open(uri), "tiny")
    front.asked.clear()
    return uri


def sign(store: Store, folder: Path, name: str) -> Path:
    private, public = make_pair(folder, name)
    for device_class in store.version("tiny").images:
        store.sign(store.version("tiny"), device_class, private)
    return public


def copy_all(source: Store, dest: Store) -> None:
    for reference in references(source):
        copy_version(source, dest, reference)


def blobs_of(store: Store) -> dict[str, bytes]:
    folder = store.root / "tiny" / "blobs" / "sha256"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Copies


def test_copies_are_equal_byte_for_byte(
    folder: Store, registry: str, bucket: str, tmp_path: Path
) -> None:
    there, in_bucket = Store.open(registry), Store.open(bucket)
    back = Store.open(str(tmp_path / "back"), create=True)
    copy_all(folder, there)
    copy_all(there, in_bucket)
    copy_all(in_bucket, back)
    assert there.models() == ["tiny"]
    assert there.versions("tiny") == [1, 2]
    assert there.version("tiny") == folder.version("tiny")
    listed = [replace(each, published=0.0) for each in versions_of(folder, "tiny")]
    assert versions_of(there, "tiny") == listed, "a registry records no times"
    assert newest_versions(there) == (listed[:1], [])
    assert dict(back.layout("tiny").tags()) == dict(folder.layout("tiny").tags())
    assert blobs_of(back) == blobs_of(folder)


def test_copying_again_sends_nothing(folder: Store, front: Front) -> None:
    folder.roll_back("tiny", 1)
    there = Store.open(front.uri("again"))
    latest = set()
    for reference in references(folder):
        copy_version(folder, there, reference)
        latest.add(there.version("tiny").number)
    assert latest == {1}, "not the version that was rolled back, at any time"
    front.asked.clear()
    copy_all(folder, there)
    assert front.num_asked("POST", "/blobs/uploads/") == 0


def test_blobs_are_mounted_within_a_registry(folder: Store, front: Front) -> None:
    first, second = Store.open(front.uri("first")), Store.open(front.uri("second"))
    copy_all(folder, first)
    front.asked.clear()
    copy_version(first, second, "tiny:2")
    assert second.version("tiny").pin == folder.version("tiny").pin
    payload = folder.manifest(folder.version("tiny"), "portable").payloads[0].digest
    assert front.num_asked("GET", payload) == 0
    assert front.num_asked("PUT", payload.replace(":", "%3A")) == 0


def test_another_version_of_a_number_is_refused(
    folder: Store, registry: str, one: Artifact, tmp_path: Path
) -> None:
    there = Store.open(registry)
    copy_version(folder, there, "tiny:1")
    rival = Store.open(str(tmp_path / "rival"), create=True)
    rival.publish("tiny", source_key="rival", artifacts=[one])
    with pytest.raises(UsageError):
        copy_version(rival, there, "tiny:1")
    assert there.version("tiny:1").pin == folder.version("tiny:1").pin


def test_both_stores_signatures_are_kept(folder: Store, registry: str, tmp_path: Path) -> None:
    there = Store.open(registry)
    copy_all(folder, there)
    sign(folder, tmp_path, "second")
    sign(there, tmp_path, "third")
    copy_all(folder, there)
    signatures = there.signatures(there.version("tiny"), "portable")
    assert signatures is not None
    assert len(signatures.signed) == 3
    (image,) = there.version("tiny").images_of("portable")
    layout, tag = there.layout("tiny"), image.digest.replace(":", "-")
    assert len(layout.index(layout.tags()[tag]).manifests) == 3


def test_campaigns_are_refused_with_a_remedy(registry: str, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("models: {}")
    command = ("optimize", tmp_path / "catalog.yaml", "--store", registry)
    done = finished(sys.executable, "-m", "freezer.cli", *command)
    assert done.returncode == 2
    assert "CP-USAGE" in done.stderr
    assert "coldpress copy" in done.stderr


# Loading, pins and the cache


def test_load_needs_no_network_with_a_pin(
    store: Store, front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Store.open(front.uri("loads"))
    copy_version(store, there, "mlp")
    pin = there.version("mlp").pin
    first = freezer.load(pin, store=there.uri)
    front.before = lambda *_: Answer(503, {}, b"")
    monkeypatch.setattr("freezer.files.registries.RETRIES", 0)
    again = freezer.load(pin, store=there.uri)
    assert again.manifest == first.manifest
    assert again.ladder == ()
    with pytest.raises(StoreUnreachableError):
        freezer.load("mlp", store=there.uri)
    assert stat.S_IMODE((tmp_path / "cache" / "coldpress").stat().st_mode) == 0o700


def test_pins_name_one_content(
    anywhere: Store, one: Artifact, two: Artifact, tmp_path: Path
) -> None:
    store = anywhere
    store.publish("tiny", source_key="key", artifacts=[one])
    store.publish("tiny", source_key="other", artifacts=[one, two])
    pins = {number: store.version(f"tiny:{number}").pin for number in (1, 2)}
    store.roll_back("tiny", 1)
    assert store.version(pins[2]).number == 2
    store.pull(store.version(pins[2]), "portable", tmp_path / "pulled").verify()
    with pytest.raises(NotPublishedError):
        store.version(f"tiny@{digest_bytes(b'none')}")
    for wrong in ("tiny@latest", "tiny@sha256:12", "tiny@"):
        with pytest.raises(IntegrityError):
            store.version(wrong)


LOAD = """
import sys
from pathlib import Path
from freezer.store import Store
store = Store.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
manifest = store.manifest(store.version("tiny"), "portable")
print(store.file(store.version("tiny"), manifest.payloads[0]).stat().st_size)
"""


def test_sixteen_processes_pull_once(big: str, front: Front) -> None:
    assert set(together(LOAD, [[big]] * 16)) == {f"{BIG_BYTES}\n"}
    assert front.num_asked("GET", payload_of(big)) == 1
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "coldpress" / "partial"
    assert [path.name for path in folder.iterdir()] == []


def payload_of(uri: str) -> str:
    store = Store.open(uri)
    return store.manifest(store.version("tiny"), "portable").payloads[0].digest


def test_an_interrupted_pull_resumes(
    big: str, front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another process, with the bytes that were there when the registry vanished."""
    payload = payload_of(big)
    front.cut_at = BIG_BYTES // 2
    front.before = lambda *_: Answer(503, {}, b"") if front.num_asked("GET", payload) > 1 else None
    monkeypatch.setattr("freezer.files.registries.RETRIES", 0)
    store = Store.open(big)
    with pytest.raises(StoreUnreachableError):
        store.pull(store.version("tiny"), "portable", tmp_path / "broken")
    (partial,) = (tmp_path / "cache" / "coldpress" / "partial").glob(f"{payload[7:]}*")
    left_bytes = partial.stat().st_size
    assert 0 < left_bytes < BIG_BYTES
    front.cut_at, front.before = None, lambda *_: None
    front.asked.clear()
    store = Store.open(big)
    store.pull(store.version("tiny"), "portable", tmp_path / "pulled").verify()
    ranges = [found["Range"] for _, _, found in front.asked if "Range" in found]
    assert ranges == [f"bytes={left_bytes}-"]


def test_a_broken_transfer_goes_on(big: str, front: Front, tmp_path: Path) -> None:
    front.cut_at = BIG_BYTES // 3
    store = Store.open(big)
    store.pull(store.version("tiny"), "portable", tmp_path / "pulled").verify()
    ranges = [found["Range"] for _, path, found in front.asked if "Range" in found]
    assert len(ranges) >= 2


def test_a_damaged_partial_download_starts_again(big: str, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / "coldpress" / "partial" / payload_of(big).removeprefix("sha256:")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(bytes(1000))
    store = Store.open(big)
    store.pull(store.version("tiny"), "portable", tmp_path / "pulled").verify()


def test_the_cache_evicts_the_least_recently_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLDPRESS_CACHE_BYTES", "2500")

    def bring(number: int) -> Path:
        content = bytes([number]) * 1000
        digest = digest_bytes(content)
        return BlobCache().local(digest, 1000, lambda start: iter([content[start:]]), "here")

    first, second = bring(0), bring(1)
    for path, age_s in ((first, 200), (second, 100)):
        os.utime(path, (time.time() - age_s,) * 2)
    bring(0)
    third = bring(2)
    assert [path.exists() for path in (first, second, third)] == [True, False, True]
    monkeypatch.setenv("COLDPRESS_CACHE_BYTES", "many")
    with pytest.raises(UsageError):
        bring(0)


# Attacks: what the registry answers is not what was published

Attack = Callable[[Answer], None]


def answered(answer: Answer, body: bytes) -> None:
    answer.body = body
    answer.headers["Content-Length"] = str(len(body))


def flipped(answer: Answer) -> None:
    answer.body = bytes([answer.body[0] ^ 1]) + answer.body[1:]


def truncated(answer: Answer) -> None:
    answered(answer, answer.body[:-1])


def padded(answer: Answer) -> None:
    answered(answer, answer.body + b" ")


def huge(answer: Answer) -> None:
    answered(answer, answer.body.ljust(DOCUMENT_BYTES + 1))


def garbage(answer: Answer) -> None:
    answered(answer, b"\xff\xfe[[")


def empty(answer: Answer) -> None:
    answered(answer, b"")


def compressed(answer: Answer) -> None:
    answer.headers["Content-Encoding"] = "gzip"


def in_circles(answer: Answer) -> None:
    answered(answer, b"")
    answer.status, answer.headers["Location"] = 307, "/v2/loop"


def missing(answer: Answer) -> None:
    answered(answer, b"{}")
    answer.status = 404


ATTACKS = (flipped, truncated, padded, huge, garbage, empty, compressed, in_circles, missing)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("level", ["index", "image", "manifest", "payload"])
def test_tampered_answers_are_refused(
    folder: Store, front: Front, tmp_path: Path, level: str, attack: Attack
) -> None:
    uri = front.uri("attacked")
    copy_all(folder, Store.open(uri))
    version = folder.version("tiny")
    image = version.images["portable"]
    content = folder.layout("tiny").image(image)
    digest = {
        "index": version.descriptor.digest,
        "image": image.digest,
        "manifest": content.config.digest,
        "payload": content.layers[0].digest,
    }[level]

    def tamper(path: str, answer: Answer) -> None:
        if path.endswith(digest) or "/loop" in path:
            attack(answer)

    front.after = tamper
    for path in cached_files(tmp_path / "cache"):
        path.unlink()
    opened = Store.open(uri)
    with pytest.raises((IntegrityError, NotPublishedError, StoreUnreachableError)):
        opened.pull(opened.version(version.pin), "portable", tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_moved_tag_is_no_other_version(folder: Store, front: Front) -> None:
    """A registry that answers `2` with version 1."""
    uri = front.uri("moved")
    copy_all(folder, Store.open(uri))
    old = front.forward("GET", f"/v2/{front.prefix}/moved/tiny/manifests/1", {}, b"")

    def swap(path: str, answer: Answer) -> None:
        if path.endswith("/manifests/2"):
            answer.body, answer.headers = old.body, dict(old.headers)

    front.after = swap
    with pytest.raises(IntegrityError):
        Store.open(uri).version("tiny:2")
    with pytest.raises(IncompatibleError):
        freezer.load("tiny", store=uri, min_version=3)


# Connections


def test_an_unknown_authority_is_refused(registry: str) -> None:
    with pytest.raises(StoreUnreachableError):
        Store.open(registry.partition("?")[0]).version("tiny")


def test_a_wrong_login_is_refused(
    folder: Store, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    with pytest.raises(StoreUnreachableError) as caught:
        copy_all(folder, Store.open(registry))
    assert "docker login" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_reset_connection_is_tried_again(folder: Store, front: Front) -> None:
    there = Store.open(front.uri("resets"))
    copy_all(folder, there)

    def fail(method: str, path: str, *_: object) -> Answer | None:
        return Answer(503, {}, b"") if front.num_asked(method, path) < 3 else None

    front.asked.clear()
    front.before = fail
    assert Store.open(there.uri).versions("tiny") == [1, 2]


def test_credentials_stay_with_their_registry(
    folder: Store, front: Front, registry_server: RunningRegistry, tmp_path: Path
) -> None:
    """Bearer tokens: the login goes to the token server alone, the token to the registry alone, and
    neither to where a blob is redirected.
    """
    uri = front.uri("tokens")
    copy_all(folder, Store.open(uri))
    write_login(registry_server.docker_config, registry_server.host, front.host)

    def guard(method: str, path: str, headers: Any) -> Answer | None:
        if path.startswith("/token"):
            return Answer(200, {}, b'{"token": "word"}')
        if path.startswith("/storage"):
            return Answer(200, {}, front.forward(method, path[8:], {}, b"").body)
        if headers.get("Authorization") != "Bearer word":
            scope = 'scope="repository:tiny:pull"'
            realm = f'Bearer realm="http://{front.host}/token",service="s",{scope}'
            return Answer(401, {"WWW-Authenticate": realm}, b"")
        if "/blobs/" in path and method == "GET":
            port = front.host.rpartition(":")[2]
            return Answer(307, {"Location": f"http://localhost:{port}/storage{path}"}, b"")
        return None

    front.before = guard
    for copy in cached_files(tmp_path / "cache"):
        copy.unlink()
    front.asked.clear()
    opened = Store.open(uri)
    opened.pull(opened.version("tiny"), "portable", tmp_path / "pulled").verify()
    sent: dict[str, set[str]] = {"token": set(), "storage": set(), "v2": set()}
    for _, path, headers in front.asked:
        kind = re.split("[/?]", path)[1]
        sent[kind].add(headers.get("Authorization", "").partition(" ")[0])
    assert sent == {"token": {"Basic"}, "storage": {""}, "v2": {"", "Bearer"}}


def test_a_redirect_without_tls_is_refused(
    folder: Store, front: Front, registry: str, registry_server: RunningRegistry, tmp_path: Path
) -> None:
    copy_all(folder, Store.open(registry))
    prefix = registry.removeprefix(f"oci://{registry_server.host}/")
    for path in cached_files(tmp_path / "cache"):
        path.unlink()
    with front_of(registry_server, tls=True) as secure:
        secure.before = lambda _, path, __: Answer(
            307, {"Location": f"http://{front.host}{path}"}, b""
        )
        with pytest.raises(StoreUnreachableError, match="expected https"):
            Store.open(f"oci://{secure.host}/{prefix}").version("tiny")
    assert {headers.get("Authorization") for _, _, headers in front.asked} == {None}


def test_docker_credential_helpers_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-own"
    helper.write_text(
        f'#!/bin/sh\nread host\nif [ "$host" = reg.example ]; then\n'
        f'echo \'{{"Username": "{USER}", "Secret": "{SECRET}"}}\'\n'
        "else\necho credentials not found in native keychain; exit 1\nfi\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    write_login(tmp_path, "other.example", credsStore="own")
    assert login_of("reg.example") == (USER, SECRET)
    assert login_of("other.example", "team/models") == (USER, SECRET)
    assert login_of("unknown.example") is None
    write_login(tmp_path, credHelpers={"reg.example": "missing"})
    with pytest.raises(OSError, match="docker-credential-missing"):
        login_of("reg.example")


@pytest.mark.parametrize(
    "uri",
    [
        "oci://",
        "oci:///models",
        "oci://user:word@reg.example/models",
        "oci://reg.example/Models",
        "oci://reg.example/models?scheme=ftp",
        "oci://reg.example/models?tsl=x",
        "s3:///models",
        "s3://key:word@bucket/models",
        "s3://bucket/models?regoin=eu-west-1",
    ],
)
def test_bad_uris_are_refused(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        Store.open(uri)
    assert "word@" not in str(caught.value)
