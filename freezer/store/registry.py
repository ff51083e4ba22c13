"""The files and tags of a store in an OCI registry (oci://). Imports no torch.

A model is a repository `PREFIX/MODEL`. Blobs are uploaded before the manifests that name them, tags
are set last. A registry has neither locks nor files: it holds published versions, and no ledger.
Documents and payloads that are named by a digest are kept in this user's cache, and read there
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from io import BytesIO
from pathlib import Path

from freezer.codec import read_json
from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files import (
    CHANGED,
    DOCUMENT_BYTES,
    Registry,
    RemoteError,
    digest_bytes,
    registry_address,
)
from freezer.store.cache import BlobCache
from freezer.store.forms import class_tags, modelpack
from freezer.store.oci_layout import MANIFESTS, NUM_TRANSFERS, Descriptor, Layout
from freezer.store.versions import NUMBER

_ACCEPT = ", ".join(MANIFESTS)
REMOVED = (
    b'{"manifests": [], "mediaType": "application/vnd.oci.image.index.v1+json", "schemaVersion": 2}'
)
"""An index without images, for tags that a registry cannot delete."""


class RegistryFiles:
    """A store in a registry; the methods are those of `LocalFiles`. Paths are those of the
    protocol, without /v2/ and the prefix.

    Attributes:
        cache: copies of blobs and documents.
    """

    exact = False

    def __init__(self, uri: str) -> None:
        self.address = registry_address(uri)
        self.cache = BlobCache()
        self._registry = Registry(self.address)
        self._prefix = f"{self.address.prefix}/".lstrip("/")

    def where(self, path: str = "") -> str:
        """A URI for messages; of the store itself the one that opened it."""
        return f"{self.address.where}/{path}" if path else self.address.uri

    def read(self, path: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Read a document by its digest; the caller verifies it."""
        read = partial(self._registry.read, self._prefix + path, limit_bytes, _ACCEPT)
        return self.cache.document(path.rpartition("/")[2], lambda: read()[0])

    def tagged(self, model: str, tag: str) -> Descriptor | None:
        """What a tag names; None without the tag."""
        path = f"{self._prefix}{model}/manifests/{tag}"
        try:
            data, media_type = self._registry.read(path, DOCUMENT_BYTES, _ACCEPT)
        except FileNotFoundError:
            return None
        digest = digest_bytes(self.cache.document(digest_bytes(data), lambda: data))
        found = Descriptor(media_type=media_type, digest=digest, size_bytes=len(data))
        return None if data == REMOVED else found

    def tag(self, model: str, tag: str, manifest: bytes | None) -> None:
        """Set a tag to a manifest, or remove it; where the registry refuses that, an empty index
        takes its place.
        """
        path = f"{model}/manifests/{tag}"
        if manifest is not None:
            self.write(path, manifest)
            return
        try:
            self._registry.send("DELETE", self._prefix + path)
        except FileNotFoundError:
            return
        except RemoteError:
            self.write(path, REMOVED)

    def write(self, path: str, data: bytes) -> None:
        """Write a manifest, or a small blob."""
        model, kind, digest = path.rsplit("/", 2)
        if kind == "manifests":
            headers = {"Content-Type": read_json(data, origin=path)["mediaType"]}
            self._registry.send("PUT", self._prefix + path, body=data, headers=headers)
        else:
            self._registry.upload(self._prefix + model, digest, BytesIO(data))

    def put(self, path: str, source: Path) -> None:
        """Upload a local file as a blob."""
        model, _, digest = path.rsplit("/", 2)
        with source.open("rb") as file:
            self._registry.upload(self._prefix + model, digest, file)

    def mount(self, path: str, other: RegistryFiles) -> bool:
        """Whether a blob of another store in the same registry now is in this one, too."""
        model, _, digest = path.rsplit("/", 2)
        return other.address.host == self.address.host and self._registry.mount(
            self._prefix + model, digest, other._prefix + model
        )

    def holds(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> bool:
        """Whether the registry has a blob of this size; readers verify its digest."""
        try:
            return self._size(path) == size_bytes
        except FileNotFoundError:
            return False

    def local(
        self,
        path: str,
        *,
        digest: str,
        size_bytes: int,
    ) -> Path:
        """A verified, read-only copy in this user's cache; see `BlobCache.local`."""
        chunks = partial(self.chunks, path, size_bytes)
        return self.cache.local(digest, size_bytes, chunks, self.where(path))

    def chunks(self, path: str, limit_bytes: int, start: int = 0) -> Iterator[bytes]:
        """Read a blob of limited size in parts, from an offset on."""
        for chunk in self._registry.stream(self._prefix + path, start):
            start += len(chunk)
            if start > limit_bytes:
                raise IntegrityError(f"{self.where(path)} is larger than expected; {CHANGED}")
            yield chunk

    def modified(self, path: str) -> float:
        """The epoch, since registries record no times; raises FileNotFoundError without the
        blob.
        """
        self._size(path)
        return 0.0

    def folders_with(self, name: str) -> list[str]:
        """Models below the prefix, sorted.

        Raises:
            StoreUnreachableError: the registry lists no repositories.
        """
        try:
            listed = list(self._registry.pages("_catalog?n=1000", "repositories"))
        except OSError as error:
            raise StoreUnreachableError(
                f"{self.where()} does not list its repositories ({error}); name a model"
            ) from error
        below = [
            each.removeprefix(self._prefix) for each in listed if each.startswith(self._prefix)
        ]
        return sorted(name for name in below if "/" not in name)

    def names(self, model: str) -> list[str]:
        """All tags of a model."""
        try:
            return list(self._registry.pages(f"{self._prefix}{model}/tags/list?n=1000", "tags"))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Nothing: registries list tags only, and remove unused blobs themselves."""
        return {}

    def remove(self, path: str) -> None:
        """Delete a manifest, if it exists.

        Raises:
            RemoteError: the registry does not delete.
        """
        with suppress(FileNotFoundError):
            self._registry.send("DELETE", self._prefix + path)

    def prepare(self, folder: str) -> None:
        """Do nothing: registries have neither folders nor partial blobs."""

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Lock nothing; callers read back what they wrote."""
        return nullcontext()

    def _size(self, path: str) -> int:
        answer = self._registry.send("HEAD", self._prefix + path, headers={"Accept": _ACCEPT})
        return int(answer.headers.get("Content-Length", "-1"))


class RegistryLayout(Layout):
    """The layout of a model in a registry: manifests have paths of their own, and tags too."""

    _files: RegistryFiles

    def path(self, digest: str, media_type: str = "") -> str:
        """The path of a blob or manifest."""
        return f"{self.model}/{'manifests' if media_type in MANIFESTS else 'blobs'}/{digest}"

    def tags(self, *names: str) -> Mapping[str, Descriptor]:
        """Descriptors by tag: of some tags, or of all."""
        try:
            wanted = names or self._files.names(self.model)
            with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
                found = list(pool.map(partial(self._files.tagged, self.model), wanted))
        except OSError as error:
            where = self._files.where(self.model)
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        return {tag: each for tag, each in zip(wanted, found, strict=True) if each}

    def begin(self) -> None:
        """Do nothing: a registry makes repositories itself."""

    def mount(self, descriptor: Descriptor, other: Layout) -> bool:
        """Whether a blob of another repository of the registry now is in this one, too."""
        path = self.path(descriptor.digest)
        return isinstance(other, RegistryLayout) and self._files.mount(path, other._files)

    def retag(self, changes: Mapping[str, Descriptor | None]) -> None:
        """Set and remove tags in order, with a tag for each class of a new version."""
        for tag, descriptor in changes.items():
            if descriptor is not None and NUMBER.fullmatch(tag):
                for name, image in class_tags(tag, self.index(descriptor)).items():
                    self._files.tag(self.model, name, self.blob(modelpack(self, image, tag)))
            manifest = self.blob(descriptor) if descriptor else None
            self._files.tag(self.model, tag, manifest)
        self._check_tags({tag: each for tag, each in changes.items() if each is not None})
