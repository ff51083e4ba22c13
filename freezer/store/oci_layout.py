"""The OCI image layout of one model: blobs by digest, and index.json that maps tags to versions. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freezer.artifact.manifest import FileRef, Payload
from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files.digest import digest_bytes, verify_file
from freezer.store.backend import RemoteError, StoreFiles

MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
TAG = "org.opencontainers.image.ref.name"
INDEX = "index.json"
_BLOBS = "blobs/sha256"


class OvertakenError(OSError):
    """Another writer wrote index.json at the same time, where locks are advisory; write again."""


class Layout:
    """The layout of one model in a store's files.

    Reading methods raise StoreUnreachableError when the store cannot be read, and IntegrityError for missing or damaged blobs.
    Writing methods raise OSError.
    """

    def __init__(self, files: StoreFiles, model: str) -> None:
        self._files, self._model = files, model
        self._index = f"{model}/{INDEX}"

    def tags(self) -> dict[str, dict[str, Any]]:
        """Descriptors by tag; empty if the model was never published."""
        where = self._files.where(self._index)
        try:
            layout = json.loads(self._files.read(self._index))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        except ValueError as error:
            raise IntegrityError(f"{where} is damaged: {error}") from None
        try:
            return {item["annotations"][TAG]: item for item in layout["manifests"] if TAG in item.get("annotations", {})}
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{where} is not an OCI index: {error}") from None

    def blob(self, descriptor: Mapping[str, Any]) -> bytes:
        """The verified content of a blob."""
        path = self._path(descriptor["digest"])
        with self._reading(path):
            data = self._files.read(path)
        if digest_bytes(data) != descriptor["digest"]:
            raise IntegrityError(f"{self._files.where(path)} does not have the digest it is named by; it was changed or damaged")
        return data

    def local(self, *, digest: str, size_bytes: int) -> Path:
        """A read-only local file of a blob; the caller verifies its digest."""
        path = self._path(digest)
        with self._reading(path):
            return self._files.local(path, digest=digest, size_bytes=size_bytes)

    def verified(self, *, digest: str, size_bytes: int) -> Path:
        """A verified read-only local file of a blob."""
        path = self.local(digest=digest, size_bytes=size_bytes)
        with self._reading(self._path(digest)):
            verify_file(path, digest=digest, size_bytes=size_bytes)
        return path

    def fetch(self, digest: str, dest: Path) -> None:
        """Copy a blob to a local file; the caller verifies its digest."""
        dest.parent.mkdir(parents=True, exist_ok=True)
        path = self._path(digest)
        with self._reading(path, unreachable=RemoteError):  # an error of the local disk stays what it is
            self._files.fetch(path, dest)

    def begin(self) -> None:
        """Prepare the layout for writing, under the model's lock."""
        self._files.prepare(self._model)
        self._files.prepare(f"{self._model}/{_BLOBS}")
        self._files.write(f"{self._model}/oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    def write_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        """Store bytes as a blob, and return its descriptor."""
        digest = digest_bytes(data)
        path = self._path(digest)
        if not self._files.holds(path, digest=digest, size_bytes=len(data)):
            self._files.write(path, data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def keep_file(self, source: Path, item: FileRef | Payload) -> None:
        """Store a file of an artifact as a blob, unless the store has it.

        Raises:
            IntegrityError: the file differs from the artifact's manifest.
        """
        path = self._path(item.digest)
        if not self._files.holds(path, digest=item.digest, size_bytes=item.size_bytes):
            verify_file(source, digest=item.digest, size_bytes=item.size_bytes)
            self._files.put(path, source)

    def write_tags(self, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Write index.json with all tags, under the model's lock.

        Raises:
            OvertakenError: where the lock is advisory, another writer has replaced index.json.
        """
        layout = {
            "schemaVersion": 2,
            "mediaType": MEDIA_INDEX,
            "manifests": [
                {**{k: v for k, v in tags[tag].items() if k != "annotations"}, "annotations": {TAG: tag}}
                for tag in sorted(tags, key=lambda tag: (not tag.isdigit(), int(tag) if tag.isdigit() else 0))
            ],
        }
        self._files.write(self._index, json_bytes(layout))
        if not self._files.exact:
            found = self.tags()
            lost = [tag for tag in tags if tag != "latest" and found.get(tag, {}).get("digest") != tags[tag]["digest"]]
            if lost:
                where = self._files.where(self._index)
                raise OvertakenError(f"{where} was overwritten by another writer and lacks {', '.join(lost)}; try again")

    def _path(self, digest: str) -> str:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
            raise IntegrityError(f"{digest!r} is not a sha256 digest")
        return f"{self._model}/{_BLOBS}/{value}"

    @contextmanager
    def _reading(self, path: str, *, unreachable: type[OSError] = OSError) -> Iterator[None]:
        where = self._files.where(path)
        try:
            yield
        except FileNotFoundError:
            raise IntegrityError(f"{where} is missing; the store is damaged") from None
        except unreachable as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """The JSON of blobs and of index.json."""
    return json.dumps(data, indent=1, sort_keys=True).encode()
