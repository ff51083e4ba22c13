"""The OCI image layout of one model: blobs by digest, and index.json that names versions by tags. Imports no torch.

    oci-layout
    index.json                tags: one per version, plus latest
    blobs/sha256/<digest>

Blobs are written first, index.json last and whole, so that a reader never sees half a version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
    """Another writer of a model's tags wrote at the same time, where locks are advisory; the writer should begin again."""


class Layout:
    """The layout of one model in a store's files.

    Reading methods raise StoreUnreachableError where the store cannot be read; writing ones, OSError where it cannot be written.
    """

    def __init__(self, files: StoreFiles, model: str) -> None:
        self._files, self._model = files, model

    def tags(self) -> dict[str, dict[str, Any]]:
        """By tag, the descriptor of what it names; none of a model that was never published.

        Raises:
            IntegrityError: index.json is damaged.
        """
        path = f"{self._model}/{INDEX}"
        where = self._files.where(path)
        try:
            layout = json.loads(self._files.read(path))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        except ValueError as error:
            raise IntegrityError(f"{where} is damaged: {error}") from None
        try:
            return {item["annotations"][TAG]: item for item in layout["manifests"] if TAG in item.get("annotations", {})}
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{where} is no OCI index: it lacks or misspells {error}") from None

    def blob(self, descriptor: Mapping[str, Any]) -> bytes:
        """The content of a blob.

        Raises:
            IntegrityError: it is missing, or not what its digest says.
        """
        path = self._path(descriptor["digest"])
        where = self._files.where(path)
        try:
            data = self._files.read(path)
        except FileNotFoundError:
            raise IntegrityError(f"{where} is missing; the store is damaged") from None
        except OSError as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        if digest_bytes(data) != descriptor["digest"]:
            raise IntegrityError(f"{where} does not have the digest it is named by; it was changed or damaged")
        return data

    def local(self, *, digest: str, size_bytes: int) -> Path:
        """A local file that stands for a blob; its digest is the caller's to verify. Read it, never write it.

        Raises:
            IntegrityError: it has to come from elsewhere, and is missing there, or is not what its digest says.
        """
        path = self._path(digest)
        try:
            return self._files.local(path, digest=digest, size_bytes=size_bytes)
        except FileNotFoundError:
            raise IntegrityError(f"{self._files.where(path)} is missing; the store is damaged") from None
        except OSError as error:
            raise StoreUnreachableError(f"{self._files.where(path)} cannot be read: {error}") from error

    def verified(self, *, digest: str, size_bytes: int) -> Path:
        """A local file that stands for a blob and has its digest; read it, never write it.

        Raises:
            IntegrityError: it is missing, or not what was published.
        """
        path = self.local(digest=digest, size_bytes=size_bytes)
        try:
            verify_file(path, digest=digest, size_bytes=size_bytes)
        except OSError as error:
            raise StoreUnreachableError(f"{path} cannot be read: {error}") from error
        return path

    def fetch(self, digest: str, dest: Path) -> None:
        """Copy a blob to a local file; its digest is the caller's to verify.

        Raises:
            IntegrityError: it is missing.
        """
        dest.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._files.fetch(self._path(digest), dest)
        except FileNotFoundError:
            raise IntegrityError(f"blob {digest} of {self._model} is missing; the store is damaged") from None
        except RemoteError as error:
            raise StoreUnreachableError(f"blob {digest} of {self._model} cannot be read: {error}") from error

    def begin(self) -> None:
        """Make the layout ready for a publisher; under the model's lock."""
        self._files.prepare(self._model)
        self._files.prepare(f"{self._model}/{_BLOBS}")
        self._files.write(f"{self._model}/oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    def write_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        """Have bytes as a blob; their descriptor."""
        digest = digest_bytes(data)
        path = self._path(digest)
        if not self._files.holds(path, digest=digest, size_bytes=len(data)):
            self._files.write(path, data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def keep_file(self, source: Path, item: FileRef | Payload) -> None:
        """Have a file of an artifact as a blob; one that is there already is trusted by its digest alone.

        Raises:
            IntegrityError: the file is not what the artifact's manifest says.
        """
        path = self._path(item.digest)
        if not self._files.holds(path, digest=item.digest, size_bytes=item.size_bytes):
            verify_file(source, digest=item.digest, size_bytes=item.size_bytes)
            self._files.put(path, source)

    def write_tags(self, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Write index.json, which shows all tags at once; under the model's lock.

        Raises:
            OvertakenError: where the lock is advisory, another writer's index.json has taken the place of this one.
        """
        layout = {
            "schemaVersion": 2,
            "mediaType": MEDIA_INDEX,
            "manifests": [
                {**{k: v for k, v in tags[tag].items() if k != "annotations"}, "annotations": {TAG: tag}}
                for tag in sorted(tags, key=lambda tag: (not tag.isdigit(), int(tag) if tag.isdigit() else 0))
            ],
        }
        self._files.write(f"{self._model}/{INDEX}", json_bytes(layout))
        if not self._files.exact:
            found = self.tags()
            lost = [tag for tag in tags if tag != "latest" and found.get(tag, {}).get("digest") != tags[tag]["digest"]]
            if lost:
                where = self._files.where(f"{self._model}/{INDEX}")
                raise OvertakenError(f"{where} was written by another at the same time, and lacks {', '.join(lost)}: try again")

    def _path(self, digest: str) -> str:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
            raise IntegrityError(f"{digest!r} is no sha256 digest")
        return f"{self._model}/{_BLOBS}/{value}"


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON as blobs hold it."""
    return json.dumps(data, indent=1, sort_keys=True).encode()
