"""The files and tags of a store in an OCI registry (oci://). Imports no torch.

A model is a repository `PREFIX/MODEL`. Blobs are uploaded before the manifests that name them, tags
are set last. A registry has neither locks nor files: it holds published versions, and no ledger.
Documents and payloads that are named by a digest are kept in this user's cache, and read there
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

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
from freezer.store.oci_layout import (
    INDEX,
    MANIFESTS,
    Descriptor,
    Layout,
)
from freezer.store.versions import NUMBER

_ACCEPT = ", ".join(MANIFESTS)
PAGE = 1000
REMOVED = (
    b'{"manifests": [], "mediaType": "application/vnd.oci.image.index.v1+json", "schemaVersion": 2}'
)
"""An index without images, for tags that a registry cannot delete."""


class RegistryFiles:
    """A store in a registry; the methods are those of `LocalFiles`. Paths are those of the
    protocol, without /v2/ and the prefix.

    Attributes:
        cache: copies of blobs and documents.
        repository: the name that repositories of models begin with.
    """

    exact = False

    def __init__(self, uri: str) -> None:
        self.address = registry_address(uri)
        self.registry = Registry(self.address)
        self.cache = BlobCache()
        self.repository = f"{self.address.prefix}/" if self.address.prefix else ""

    def where(self, path: str = "") -> str:
        """A URI for messages; of the store itself the one that opened it."""
        return f"{self.address.where}/{path}" if path else self.address.uri

    def read(self, path: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Read a document by its digest; the caller verifies it."""
        digest = path.rpartition("/")[2]
        return self.cache.document(digest, lambda: self._fetched(path, limit_bytes))

    def _fetched(self, path: str, limit_bytes: int) -> bytes:
        try:
            return self.registry.read(self.repository + path, limit_bytes, _ACCEPT)[0]
        except ValueError as error:
            raise IntegrityError(f"{self.where(path)}: {error}; {CHANGED}") from None

    def manifest(self, model: str, tag: str) -> Descriptor | None:
        """What a tag names; None without the tag."""
        path = f"{model}/manifests/{tag}"
        try:
            data, media_type = self.registry.read(
                self.repository + path,
                DOCUMENT_BYTES,
                _ACCEPT,
            )
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise IntegrityError(f"{self.where(path)}: {error}; {CHANGED}") from None
        if data == REMOVED:
            return None
        digest = digest_bytes(data)
        self.cache.document(digest, lambda: data)
        media_type = media_type.partition(";")[0]
        return Descriptor(media_type=media_type, digest=digest, size_bytes=len(data))

    def write(self, path: str, data: bytes) -> None:
        """Write a manifest, or a small blob."""
        model, kind, name = path.rsplit("/", 2)
        if kind == "manifests":
            media_type = read_json(data, origin=path)["mediaType"]
            headers = {"Content-Type": media_type}
            self.registry.send("PUT", self.repository + path, body=data, headers=headers).close()
        else:
            self.registry.upload(self.repository + model, name, BytesIO(data))

    def put(self, path: str, source: Path) -> None:
        """Upload a local file as a blob."""
        model, _, digest = path.rsplit("/", 2)
        with source.open("rb") as file:
            self.registry.upload(self.repository + model, digest, file)

    def mount(self, path: str, other: RegistryFiles) -> bool:
        """Whether a blob of another store in the same registry now is in this one, too."""
        model, _, digest = path.rsplit("/", 2)
        if other.address.host != self.address.host:
            return False
        return self.registry.mount(self.repository + model, digest, other.repository + model)

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
        return self.cache.local(
            digest,
            size_bytes,
            lambda start: self.chunks(path, size_bytes, start),
            self.where(path),
        )

    def chunks(self, path: str, limit_bytes: int, start: int = 0) -> Iterator[bytes]:
        """Read a blob of limited size in parts, from an offset on."""
        for chunk in self.registry.stream(self.repository + path, start):
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
        assert name == INDEX
        try:
            listed = [*self.registry.pages(f"_catalog?{urlencode({'n': PAGE})}", "repositories")]
        except (FileNotFoundError, RemoteError) as error:
            raise StoreUnreachableError(
                f"{self.where()} does not list its repositories ({error}); name a model"
            ) from error
        below = [item.removeprefix(self.repository) for item in listed if self._is_below(item)]
        return sorted(below)

    def _is_below(self, repository: str) -> bool:
        rest = repository.removeprefix(self.repository)
        return repository.startswith(self.repository) and "/" not in rest

    def names(self, model: str) -> list[str]:
        """All tags of a model."""
        path = f"{self.repository}{model}/tags/list?{urlencode({'n': PAGE})}"
        try:
            return list(self.registry.pages(path, "tags"))
        except FileNotFoundError:
            return []

    def remove_tag(self, model: str, tag: str) -> None:
        """Remove a tag; where the registry refuses that, an empty index takes its place."""
        path = f"{model}/manifests/{tag}"
        try:
            self.registry.send("DELETE", self.repository + path).close()
        except FileNotFoundError:
            return
        except RemoteError:
            self.write(path, REMOVED)

    def prepare(self, folder: str) -> None:
        """Do nothing: registries have neither folders nor partial blobs."""

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Lock nothing; callers read back what they wrote."""
        return nullcontext()

    def _size(self, path: str) -> int:
        answer = self.registry.send("HEAD", self.repository + path, headers={"Accept": _ACCEPT})
        answer.close()
        return int(answer.headers.get("Content-Length", "-1"))


class RegistryTags(Mapping[str, Descriptor]):
    """The tags of a model, read when they are asked for."""

    def __init__(self, files: RegistryFiles, model: str) -> None:
        self._files, self._model = files, model
        self._known: dict[str, Descriptor | None] = {}
        self._names: list[str] | None = None

    def __getitem__(self, tag: str) -> Descriptor:
        if tag not in self._known:
            try:
                self._known[tag] = self._files.manifest(self._model, tag)
            except OSError as error:
                where = self._files.where(f"{self._model}:{tag}")
                raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        found = self._known[tag]
        if found is None:
            raise KeyError(tag)
        return found

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            try:
                self._names = self._files.names(self._model)
            except OSError as error:
                where = self._files.where(self._model)
                raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RegistryLayout(Layout):
    """The layout of a model in a registry: manifests have paths of their own, and tags too."""

    _files: RegistryFiles

    def path(self, digest: str, media_type: str = "") -> str:
        """The path of a blob or manifest."""
        return f"{self.model}/{'manifests' if media_type in MANIFESTS else 'blobs'}/{digest}"

    def tags(self) -> Mapping[str, Descriptor]:
        """Descriptors by tag, read one by one."""
        return RegistryTags(self._files, self.model)

    def begin(self) -> None:
        """Do nothing: a registry makes repositories itself."""

    def mount(self, descriptor: Descriptor, other: Layout) -> bool:
        """Whether a blob of another repository of the registry now is in this one, too."""
        if not isinstance(other, RegistryLayout):
            return False
        return self._files.mount(self.path(descriptor.digest), other._files)

    def retag(self, changes: Mapping[str, Descriptor | None]) -> None:
        """Set and remove tags in order, with a tag for each class of a new version."""
        written = {}
        for tag, descriptor in changes.items():
            if descriptor is None:
                self._files.remove_tag(self.model, tag)
            else:
                if NUMBER.fullmatch(tag):
                    self._tag_classes(tag, descriptor)
                self._files.write(f"{self.model}/manifests/{tag}", self.blob(descriptor))
                written[tag] = descriptor
        self._check_tags(written)

    def _tag_classes(self, number: str, version: Descriptor) -> None:
        """Tag a ModelPack manifest of each image of a version."""
        for tag, image in class_tags(number, self.index(version)).items():
            pack = modelpack(self, image, number)
            self._files.write(f"{self.model}/manifests/{tag}", self.blob(pack))
