"""Stores and folders whose digests are right and whose content is not: every reader raises a
ColdpressError.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import freezer
from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, MEDIA_SAFETENSORS, Artifact, file_ref
from freezer.artifact.description import describe
from freezer.codec import encode
from freezer.errors import (
    CanaryError,
    ColdpressError,
    ContractError,
    IncompatibleError,
    IntegrityError,
)
from freezer.files import digest_bytes
from freezer.pyfunc import _load_pyfunc
from freezer.serving.verify import verify
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.documents import places
from tests.support.keys import make_pair
from tests.support.steps import blob_of, copy_of, rewritten

VALUES: tuple[Any, ...] = (None, 7, -1.5, "²", "\ud800", "a/\0", [], {}, [7], {"a": 7}, 10**30)
"""Replacements of every value of a document."""

TEXTS = (
    b"",
    b"7",
    b"[]",
    b"{}",
    b'"\\ud800"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b"NaN",
    b"1e999",
)


class Blobs:
    """The documents of one model of a store, from index.json down to one artifact's
    manifest.json.
    """

    def __init__(self, store: Store, model: str, device_class: str) -> None:
        self.folder, self.device_class = store.root / model, device_class

    def read(self, level: str) -> bytes:
        if level == "index.json":
            return (self.folder / "index.json").read_bytes()
        digest: str = self._descriptor(level)["digest"]
        return blob_of(self.folder, digest).read_bytes()

    def write(self, level: str, data: bytes) -> None:
        """Replace a document, and its digests and sizes in those above."""
        if level == "index.json":
            (self.folder / "index.json").write_bytes(data)
            return
        digest = digest_bytes(data)
        blob_of(self.folder, digest).write_bytes(data)
        above = {
            "index": "index.json",
            "image": "index",
            "manifest": "image",
            "signatures": "index.json",
        }[level]
        old, holder = self._descriptor(level)["digest"].encode(), self.read(above)
        size = rb'("digest": "%b"[^\]]*?"size": )\d+' % old
        holder = re.sub(size, rb"\g<1>%d" % len(data), holder)
        self.write(above, holder.replace(old, digest.encode()))

    def _descriptor(self, level: str) -> Any:
        if level == "manifest":
            return json.loads(self.read("image"))["config"]
        found = json.loads(self.read("index" if level == "image" else "index.json"))["manifests"]
        if level == "image":
            return next(
                item
                for item in found
                if item["annotations"]["dev.coldpress.device-class"] == self.device_class
            )
        suffix = ".sig" if level == "signatures" else "1"
        return next(
            item
            for item in found
            if item["annotations"]["org.opencontainers.image.ref.name"].endswith(suffix)
        )


def mutations(data: bytes) -> Iterator[bytes]:
    """The document without one value, or with another in its place, for every value."""
    document = json.loads(data)
    for path in places(document):
        if not path:
            continue
        for value in (..., *VALUES):
            changed = copy.deepcopy(document)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield json.dumps(changed).encode()


@pytest.fixture
def signed(store: Store, tmp_path: Path) -> tuple[Store, Path]:
    """A store with a signature of `portable`, and the public key."""
    private, public = make_pair(tmp_path, "own")
    store.sign(store.version("mlp"), "portable", private)
    return store, public


def read_all(store: Store, dest: Path) -> None:
    """Read as `pull`, `inspect`, `verify` and `load` do, up to the payloads."""
    store.versions("mlp")
    version = store.version("mlp")
    for name in version.images:
        manifest = store.manifest(version, name)
        str(list(describe(manifest))).encode()
        manifest.to_bytes()
        store.signatures(version, name)
    if "portable" in version.images:
        shutil.rmtree(dest, ignore_errors=True)
        store.pull(version, "portable", dest)


@pytest.mark.parametrize(
    ("level", "step"),
    [("index.json", 5), ("index", 5), ("image", 17), ("manifest", 47), ("signatures", 5)],
)
def test_every_reader_raises_coldpress_errors(
    signed: tuple[Store, Path], tmp_path: Path, level: str, step: int
) -> None:
    """Every `step`-th mutation; all were tried when the test was written."""
    store, _ = signed
    blobs = Blobs(store, "mlp", "portable")
    before, index = blobs.read(level), blobs.read("index.json")
    num_refused = 0
    for data in (*TEXTS, *islice(mutations(before), 0, None, step)):
        blobs.write(level, data)
        try:
            read_all(store, tmp_path / "pulled")
        except ColdpressError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"{level}: {data[:3000]!r}") from error
        finally:
            blobs.write("index.json", index)
    assert num_refused > 20


@pytest.mark.parametrize(
    "data", [b"[]", b"\xff", b'{"config": 7}', b'{"config": {}, "layers": [{"annotations": 3}]}']
)
def test_a_broken_signature_image_is_unsigned(signed: tuple[Store, Path], data: bytes) -> None:
    store, public = signed
    Blobs(store, "mlp", "portable").write("signatures", data)
    with pytest.raises(IncompatibleError) as caught:
        freezer.load("mlp", store=str(store.root), device_class="portable", trusted_keys=[public])
    (refusal,) = caught.value.ladder
    assert refusal.reason == "unsigned"
    with pytest.raises(IntegrityError) as unsigned:
        verify("mlp", store=str(store.root), device_class="portable", trusted_keys=[public])
    assert unsigned.value.code == "CP-UNSIGNED"


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def no_set(path: Path) -> None:
    save_file(
        {name: tensor for name, tensor in load_file(path).items() if not name.startswith("0/")},
        path,
    )


def other_dtype(path: Path) -> None:
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(path).items()}, path)


def other_shape(path: Path) -> None:
    save_file({name: torch.zeros(3, 5, 7) for name in load_file(path)}, path)


def bad_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={"complex128": "[7"})


@pytest.mark.parametrize("path", [GOLDEN_INPUTS, GOLDEN_OUTPUTS])
@pytest.mark.parametrize(
    "change",
    [garbage, no_set, other_dtype, other_shape, bad_metadata],
)
def test_golden_files_of_another_shape(
    portable: Frozen, tmp_path: Path, path: str, change: Callable[[Path], None]
) -> None:
    """Golden files whose digests are right: damage, or a difference that the contract or the canary
    finds.
    """
    copied = copy_of(portable.artifact, tmp_path / "copy")
    (copied.folder / path).chmod(0o644)
    change(copied.folder / path)
    files = tuple(
        file_ref(copied.folder, path, MEDIA_SAFETENSORS) if item.path == path else item
        for item in copied.manifest.files
    )
    artifact = rewritten(copied, files=files)
    with pytest.raises((IntegrityError, ContractError, CanaryError)):
        verify(artifact.folder)
    with pytest.raises(IncompatibleError):
        freezer.load(artifact.folder)


def changed(artifact: Artifact, **changes: Any) -> None:
    path = artifact.folder / "manifest.json"
    path.write_text(json.dumps(encode(artifact.manifest) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"needs": {"torch": "x"}},
        {"outputs": []},
        {"inputs": {"inputs": []}},
        {"structure": {"kind": "tuple", "items": [{"kind": "constant"}]}},
    ],
)
def test_manifests_that_contradict_their_files(
    portable: Frozen, tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    artifact = copy_of(portable.artifact, tmp_path / "copy")
    changed(artifact, **changes)
    for read in (verify, freezer.load):
        with pytest.raises(ColdpressError):
            read(artifact.folder)


@pytest.mark.parametrize("point", [{}, {"batch": 99}])
def test_golden_sizes_beyond_the_dims_are_refused(
    portable: Frozen, tmp_path: Path, point: dict[str, int]
) -> None:
    artifact = copy_of(portable.artifact, tmp_path / "copy")
    changed(artifact, golden=[{"point": point, "native_rmse": {}}])
    with pytest.raises(IncompatibleError):
        freezer.load(artifact.folder)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"store": 7}', '{"store": "s", "model": [], "version": 1, "device_class": ""}'],
)
def test_references_of_another_shape(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(IntegrityError):
        _load_pyfunc(str(tmp_path))
