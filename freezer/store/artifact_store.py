"""A store of artifacts: one OCI layout per model, in a local folder or a bucket, or one repository
per model in a registry. Imports no torch.

    STORE/<model>/oci-layout
    STORE/<model>/index.json             tags: one per version, and latest
    STORE/<model>/blobs/sha256/<digest>

A version is an index of images. The annotation `dev.coldpress.device-class` names the device class
of an image; a class has two where the better one needs an engine besides torch, best first.
`latest` is the newest version, unless rolled back, or unless only that lacks `portable`: all its
images are of one source. Blobs are written first, index.json last and atomically, so readers never
see half a version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlparse

from freezer.artifact import (
    Artifact,
    Claims,
    FileRef,
    Manifest,
    Payload,
    Signatures,
    bundle_with,
    is_by,
    signed_with,
)
from freezer.errors import IntegrityError, NotPublishedError, StoreUnreachableError, UsageError
from freezer.files import (
    OCI,
    SCHEMES,
    cache_folder,
    make_folder,
    open_bucket,
    verify_file,
)
from freezer.store.forms import referrers_tag, write_bundle
from freezer.store.local_files import WORK, LocalFiles, local_folder
from freezer.store.oci_layout import INDEX, Descriptor, Layout, OvertakenError
from freezer.store.publication import (
    Move,
    Notes,
    check_name,
    chosen_tag,
    promote,
    read_notes,
    roll_back,
    take_back,
    write_version,
)
from freezer.store.versions import (
    LATEST,
    NAME,
    NUMBER,
    Version,
    copy_image,
    link_image,
    pinned,
    signature_tag,
    signatures_of,
    version_of,
)

if TYPE_CHECKING:
    from freezer.store.bucket import RemoteFiles
    from freezer.store.oci_layout import Files
    from freezer.store.registry import RegistryFiles

_T = TypeVar("_T")

TRIES = 3
"""Attempts at a write where locks are advisory."""


class Store:
    """A store.

    Methods raise StoreUnreachableError when the store cannot be read or written, NotPublishedError
    when it lacks the model, version or device class, and IntegrityError when a blob is missing or
    damaged.

    Args:
        root: the store's folder; of a store in a bucket a local working folder, which may be
            missing.
        remote: the bucket.
        registry: the registry, which has no ledger.

    Attributes:
        files: its files.
        uri: opens the store again.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteFiles | None = None,
        registry: RegistryFiles | None = None,
    ) -> None:
        self.root = root
        self.remote = remote
        self.registry = registry
        self.files: Files = registry or remote or LocalFiles(root)
        self.uri = self.files.where()

    @classmethod
    def open(cls, uri: str, *, create: bool = False) -> Store:
        """Open the store at a URI.

        Args:
            uri: a path, `file:` and a path, a place in a bucket, or `oci://HOST/REPOSITORY`.
            create: make a missing folder; buckets must exist.

        Raises:
            StoreUnreachableError: the folder or bucket is missing or cannot be reached.
            UsageError: the scheme is not supported.
            MissingDependencyError: the store is in a bucket or registry, and pyarrow or urllib3 is
                not installed.
        """
        scheme = urlparse(uri).scheme
        root = cache_folder() / "work" / hashlib.sha256(uri.encode()).hexdigest()[:16]
        if scheme in SCHEMES:
            from freezer.store.bucket import RemoteFiles

            return cls(root, RemoteFiles(open_bucket(uri)))
        if scheme == OCI:
            from freezer.store.registry import RegistryFiles

            return cls(root, registry=RegistryFiles(uri))
        root = local_folder(uri)
        try:
            if create:
                make_folder(root / WORK)
        except OSError as error:
            raise StoreUnreachableError(
                f"store {uri!r} cannot be made: {error}; name a writable folder"
            ) from error
        if not root.is_dir():
            raise StoreUnreachableError(
                f"store {uri!r} is not there; expected the folder that models were published to"
            )
        return cls(root)

    def models(self) -> list[str]:
        """Names of all published models, sorted."""
        return self.files.folders_with(INDEX)

    def versions(self, model: str) -> list[int]:
        """Version numbers of a model, ascending; empty if it was never published."""
        return sorted(int(tag) for tag in self.layout(model).tags() if NUMBER.fullmatch(tag))

    def version(self, reference: str, key: str | None = None) -> Version:
        """The version named by `MODEL`, `MODEL:latest`, `MODEL:3`, `MODEL:prod` or
        `MODEL@sha256:HEX`; by the digest exactly what was published, also where `latest` moved or
        the store was exchanged.

        Args:
            reference: the name.
            key: of a caller, for whom the canary of the name may serve.
        """
        mark = "@" if "@" in reference else ":"
        model, _, tag = reference.partition(mark)
        layout = self.layout(model)
        tag = tag or (LATEST if mark == ":" else "")
        if key is not None and mark == ":":
            tag = chosen_tag(layout, tag, key)
        found = pinned(layout, tag) if mark == "@" else layout.tags(tag).get(tag)
        if found is None:
            known = ", ".join(map(str, self.versions(model)))
            raise NotPublishedError(
                f"{model}{mark}{tag} is not in store {self.uri}; versions of this model:"
                f" {known or 'none'}"
            )
        return version_of(layout, tag, found, store=self.uri)

    def find(self, reference: str) -> Version | None:
        """The version of a reference; None if it is not there, or its index is lost or damaged."""
        with suppress(IntegrityError, NotPublishedError):
            return self.version(reference)
        return None

    def manifest(
        self,
        version: Version,
        device_class: str,
        *,
        rank: int = 0,
    ) -> Manifest:
        """The manifest of one artifact.

        Args:
            version: result of `version()`.
            device_class: name of one of its classes.
            rank: position of the artifact among those of the class, best first.
        """
        data = self.manifest_bytes(version, device_class, rank=rank)
        origin = f"{version.model}:{version.number} for {device_class}"
        return Manifest.from_bytes(data, origin=origin)

    def manifest_bytes(
        self,
        version: Version,
        device_class: str,
        *,
        rank: int = 0,
    ) -> bytes:
        """The manifest.json of one artifact, byte for byte; see `manifest`."""
        return self.layout(version.model).artifact_manifest(version.image(device_class, rank))

    def file(
        self,
        version: Version,
        item: FileRef | Payload,
    ) -> Path:
        """A verified local copy of one file of an artifact, read-only; a store in a folder gives
        its own.
        """
        path = self.layout(version.model).local(item)
        if self.files.exact:
            verify_file(path, digest=item.digest, size_bytes=item.size_bytes)
        return path

    def drop_copies(self, digests: Iterable[str]) -> None:
        """Remove blobs of a store in a bucket or registry from this user's cache."""
        remote = self.registry or self.remote
        if remote is not None:
            for digest in digests:
                remote.cache.path(digest).unlink(missing_ok=True)

    def pull(
        self,
        version: Version,
        device_class: str,
        dest: Path,
        *,
        rank: int = 0,
    ) -> Artifact:
        """Copy one artifact into a folder and verify every digest.

        Args:
            version, device_class, rank: see `manifest`.
            dest: a new or empty folder, or one that contains this artifact, which is kept.

        Raises:
            IntegrityError: a blob is damaged; `dest` is unchanged.
            UsageError: `dest` contains something else, or cannot be written.
        """
        image = version.image(device_class, rank)
        signatures = self.signatures(version, device_class, rank=rank)
        return copy_image(self.layout(version.model), image, dest, signatures)

    def materialize(
        self,
        version: Version,
        device_class: str,
        folder: Path,
        *,
        rank: int = 0,
        paths: Collection[str] | None = None,
        stack: ExitStack | None = None,
    ) -> Artifact:
        """Make a read-only artifact folder of links to the store's blobs.

        Args:
            version, device_class, rank: see `manifest`.
            folder: a new or empty folder.
            paths: the files to link; None links all.
            stack: holds the files open, so that this process reads them also after the cache was
                deleted.
        """
        image = version.image(device_class, rank)
        return link_image(self.layout(version.model), image, folder, paths, stack)

    def signatures(
        self, version: Version, device_class: str, *, rank: int = 0
    ) -> Signatures | None:
        """The signatures of one artifact, see `manifest`; None if it is not signed."""
        image = version.image(device_class, rank)
        origin = f"{self.uri}: the signature of {version.model}:{version.number}"
        return signatures_of(self.layout(version.model), image, origin=origin)

    def sign(
        self,
        version: Version,
        device_class: str,
        key: Path,
    ) -> bool:
        """Verify and sign the artifacts of a class.

        Args:
            version: result of `version()`.
            device_class: name of one of its classes.
            key: file of a private EC key on P-256, PEM.

        Returns:
            False if the key has signed all of them before.

        Raises:
            UsageError: the key cannot be used.
        """
        num_images = len(version.images_of(device_class))
        signed = [self._sign(version, device_class, rank, key) for rank in range(num_images)]
        return any(signed)

    def _sign(
        self,
        version: Version,
        device_class: str,
        rank: int,
        key: Path,
    ) -> bool:
        layout = self.layout(version.model)
        image = version.image(device_class, rank)
        for item in self.manifest(version, device_class, rank=rank).contents:
            self.file(version, item)
        claims = Claims(model=version.model, version=version.number, device_class=device_class)
        new = signed_with(key, image_digest=image.digest, claims=claims)
        bundle = bundle_with(key, image_digest=image.digest, claims=claims)

        def write() -> bool:
            signatures = self.signatures(version, device_class, rank=rank)
            signed = signatures.signed if signatures else ()
            for known in signed:
                if known.payload == new.payload and is_by(known, key):
                    return False
            changes = {
                referrers_tag(image): write_bundle(layout, image, bundle),
                signature_tag(image): layout.write_signatures((*signed, new)),
            }
            layout.retag(changes)
            return True

        return self._written(version.model, write)

    def publish(
        self,
        model: str,
        *,
        source_key: str,
        artifacts: Sequence[Artifact] = (),
        carried: Sequence[Descriptor] = (),
        decided: Collection[str] = (),
    ) -> Version:
        """Publish a new version, unless it would equal the newest one.

        Args:
            model: name of the model.
            source_key: key of the source of all its artifacts.
            artifacts: new artifacts, of each device class best first; their folders are unchanged.
            carried: descriptors of images of earlier versions to keep.
            decided: the classes for which `artifacts` and `carried` are the answer, also where they
                have none. Other classes keep their images of the newest version if its source is
                the same.

        Returns:
            The new version, or the newest one if nothing differs; missing or damaged blobs of that
            are written again, and a rollback stays.

        Raises:
            StoreUnreachableError: the store cannot be written; readers see no half version.
        """
        if not NAME.fullmatch(model):
            raise UsageError(f"model {model!r}: a name must match {NAME.pattern}")
        layout = self.layout(model)

        def send() -> None:
            for artifact in artifacts:
                layout.write_files(artifact)

        write = partial(write_version, self, model, source_key, artifacts, carried, decided)
        return self.write_model(model, send, write)

    def roll_back(self, model: str, number: int | None) -> Version:
        """Make `latest` an earlier version, and return that. Later ones stay; the next one that is
        added becomes `latest`.

        Args:
            model: name of the model.
            number: of the version; None undoes the last rollback.

        Raises:
            NotPublishedError: the store has no such version.
            UsageError: no rollback is left to undo.
            IntegrityError: a file is missing, or a manifest or index is damaged; nothing was
                changed.
        """
        return self._written(model, partial(roll_back, self, model, number))

    def promote(
        self,
        reference: str,
        name: str,
        *,
        share: float | None = None,
        remove: bool = False,
    ) -> Move:
        """Make a name point at a version, and note who did.

        Args:
            reference: the version; of a name to remove, the model.
            name: such as `prod`.
            share: of the keys of `prod` that `prod-canary` serves.
            remove: whether the name is removed.

        Raises:
            NotPublishedError: the store has no such version.
            UsageError: the name cannot be used.
            IntegrityError: a file is missing; nothing was changed.
        """
        if not remove:
            check_name(name, share)
        write = partial(promote, self, reference, name, share, remove=remove)
        return self._written(reference.partition("@")[0].partition(":")[0], write)

    def take_back(self, model: str, move: Move) -> None:
        """Undo a move of a name, unless it was moved again since."""
        self._written(model, partial(take_back, self, model, move))

    def notes(self, model: str) -> Notes:
        """What the store notes of a model, such as the moves of its names."""
        return read_notes(self.layout(model))

    def write_model(
        self,
        model: str,
        send: Callable[[], object],
        write: Callable[[], _T],
    ) -> _T:
        """Write to the layout of a model.

        Args:
            send: writes the blobs that are missing; where the lock must be held only briefly, first
                before it, and again under it for what was removed as garbage since.
            write: writes manifests and tags, under the lock.
        """
        layout = self.layout(model)
        if not self.files.exact:
            with self._writing():
                send()

        def write_all() -> _T:
            layout.begin()
            send()
            return write()

        return self._written(model, write_all)

    def _written(
        self,
        model: str,
        write: Callable[[], _T],
    ) -> _T:
        """Run a write under the model's lock; again where the lock is advisory and another writer
        interfered.
        """
        for _ in range(TRIES - 1):
            with suppress(OvertakenError), self._writing(), self.files.locked(model):
                return write()
        with self._writing(), self.files.locked(model):
            return write()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnreachableError(f"store {self.uri} cannot be written: {error}") from error

    def layout(self, model: str) -> Layout:
        """The OCI image layout of a model, which may not be published."""
        if not NAME.fullmatch(model):
            raise NotPublishedError(
                f"{model!r} is not a model's name; expected {NAME.pattern}, optionally with"
                " :VERSION or @DIGEST"
            )
        if self.registry is not None:
            from freezer.store.registry import RegistryLayout

            return RegistryLayout(self.registry, model)
        return Layout(self.files, model)
