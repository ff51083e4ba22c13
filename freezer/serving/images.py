"""Resolve a reference to the artifacts that it names. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.artifact import (
    MANIFEST,
    Artifact,
    Claims,
    Manifest,
    Signatures,
    folder_of,
    problem_of,
    read_artifacts,
)
from freezer.codec import frozen
from freezer.errors import IntegrityError, Refusal, StoreUnreachableError
from freezer.files import read_document, scratch_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from freezer.store import Store, Version


@frozen
class Image:
    """A published artifact of one device class; its files are read when a function is called.

    Attributes:
        device_class: device class of the artifact.
        manifest: reads the manifest.
        manifest_bytes: reads manifest.json byte for byte.
        signatures: reads the signatures.
        fetch: makes files available locally: those at some paths, or all.
        asked: what a signature must vouch for; None for a folder.
        is_fallback: whether this is the second part of an artifact of an earlier release, which
            needs torch alone.
    """

    device_class: str
    manifest: Callable[[], Manifest]
    manifest_bytes: Callable[[], bytes]
    signatures: Callable[[], Signatures | None]
    fetch: Callable[[Collection[str] | None], Artifact]
    asked: Claims | None = None
    is_fallback: bool = False

    def fallbacks(self) -> tuple[Image, ...]:
        """The part of the artifact that needs torch alone, if it has one and can be read."""
        if self.is_fallback:
            return ()
        try:
            second = self.manifest().without_engine()
        except StoreUnreachableError:
            raise
        except Exception:  # why it cannot be read is recorded by whoever refused it
            return ()
        if second is None:
            return ()
        part = replace(
            self,
            manifest=lambda: second,
            fetch=lambda paths: replace(self.fetch(paths), manifest=second),
            is_fallback=True,
        )
        return (part,)

    def unsigned(self, keys: Sequence[EllipticCurvePublicKey]) -> Refusal | None:
        """Why no trusted key vouches for the artifact; None where one does."""
        manifest_bytes = self.manifest_bytes()
        try:
            problem = problem_of(self.signatures(), manifest_bytes, keys, self.asked)
        except IntegrityError as error:
            problem = str(error)
        if problem is None:
            return None
        claims = "any version" if self.asked is None else str(self.asked)
        return Refusal(
            rung=self.device_class,
            reason="unsigned",
            got=problem,
            expected=f"a signature of {claims} by one of {len(keys)} trusted keys",
        )


def resolve_reference(
    reference: str | Path,
    store: str | None,
    key: str | None = None,
) -> tuple[Store, Version] | None:
    """The store and the version that a reference names; None for a folder.

    Args:
        reference: `MODEL` or `MODEL:VERSION` in a store, or an artifact folder.
        store: URI of the store; `./store` by default.
        key: of a caller, for whom the canary of a name may serve.

    Raises:
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
    """
    if folder_of(reference) is not None:
        return None
    from freezer.store import Store  # a folder needs none of it

    opened = Store.open(store or "store")
    return opened, opened.version(str(reference), key)


def images_of(
    reference: str | Path,
    published: tuple[Store, Version] | None,
    stack: ExitStack,
) -> tuple[Image, ...]:
    """List the artifacts that a reference names; manifests in a store are not read yet.

    Args:
        reference: `MODEL` or `MODEL:VERSION` in a store, or an artifact folder.
        published: result of `resolve_reference`.
        stack: owns the temporary folders of fetched artifacts.
    """
    if published is None:
        return tuple(map(_folder_image, read_artifacts(Path(reference))))
    store, version = published
    images: list[Image] = []
    for name in version.images:
        for rank in range(len(version.images_of(name))):
            images.append(_store_image(store, version, name, rank, stack))
    return tuple(images)


def _folder_image(artifact: Artifact) -> Image:
    return Image(
        device_class=artifact.manifest.device_class,
        manifest=lambda: artifact.manifest,
        manifest_bytes=partial(_manifest_bytes, artifact),
        signatures=partial(Signatures.read, artifact.folder),
        fetch=lambda _: artifact,
    )


def _manifest_bytes(artifact: Artifact) -> bytes:
    """The bytes of manifest.json, if they still are those of the artifact."""
    path = artifact.folder / MANIFEST
    data = read_document(path)
    if Manifest.from_bytes(data, origin=str(path)) != artifact.manifest:
        raise IntegrityError(f"{path} changed while it was read; pull the artifact again")
    return data


def _store_image(
    store: Store,
    version: Version,
    name: str,
    rank: int,
    stack: ExitStack,
) -> Image:
    return Image(
        device_class=name,
        manifest=partial(
            store.manifest,
            version,
            name,
            rank=rank,
        ),
        manifest_bytes=partial(
            store.manifest_bytes,
            version,
            name,
            rank=rank,
        ),
        signatures=partial(
            store.signatures,
            version,
            name,
            rank=rank,
        ),
        fetch=lambda paths: store.materialize(
            version,
            name,
            stack.enter_context(scratch_folder()),
            rank=rank,
            paths=paths,
            stack=stack,
        ),
        asked=Claims(
            model=version.model,
            version=version.number,
            device_class=name,
        ),
    )
