"""Copy versions between stores, byte for byte, with their signatures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freezer.errors import UsageError
from freezer.files import scratch_folder
from freezer.progress import transferred
from freezer.store.artifact_store import Store
from freezer.store.forms import (
    IMAGE,
    image_form,
    image_index,
    referrers_tag,
    write_referrers,
)
from freezer.store.oci_layout import (
    MANIFESTS,
    MEDIA_IMAGE,
    MEDIA_INDEX,
    NUM_TRANSFERS,
    Descriptor,
    Layout,
)
from freezer.store.versions import LATEST, Version, signature_tag, signatures_of

Form = Literal["artifacts", "image"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A version in the store that it was copied to.

    Attributes:
        version: the version.
        tags: the tags that now name it.
        digest: of the index that they name.
        size_bytes: of its blobs, of which `new_bytes` were not there before.
    """

    version: Version
    tags: tuple[str, ...]
    digest: str
    size_bytes: int
    new_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The references that name it there."""
        return tuple(f"{self.version.model}:{tag}" for tag in self.tags)


def references(store: Store, models: Iterable[str]) -> list[str]:
    """The references of versions to copy: those that are given, or all versions of all models."""
    given = list(models)
    if given:
        return given
    listed = []
    for model in store.models():
        listed += [f"{model}:{number}" for number in store.versions(model)]
    return listed


def copy_version(
    source: Store,
    dest: Store,
    reference: str,
    form: Form = "artifacts",
) -> Copied:
    """Copy a version; what the other store has already is not sent again.

    Its number stays. `latest` of the other store becomes this version if it is that of this store,
    or if the other store has none.

    Args:
        reference: `MODEL`, `MODEL:VERSION` or `MODEL@DIGEST`.
        form: `artifacts` keeps every byte; `image` writes images that can be mounted, under the
            tags `VERSION-image`, `VERSION-CLASS-image` and `latest-image`.

    Raises:
        UsageError: the other store has another version of this number.
        NotPublishedError, IntegrityError, StoreUnreachableError: as methods of Store.
    """
    version = source.version(reference)
    if form == "image":
        return _copy_images(source, dest, version)
    origin, target = source.layout(version.model), dest.layout(version.model)
    known = target.tags().get(str(version.number))
    if known is not None and known.digest != version.descriptor.digest:
        raise UsageError(
            f"{dest.uri} has another {version.model}:{version.number} ({known.digest}) than"
            f" {source.uri} ({version.descriptor.digest}); copy to another place, or publish it"
            " there as a new version"
        )
    tags = origin.tags()
    attached = {}
    for image in version.index:
        for tag in (signature_tag(image), referrers_tag(image)):
            if tag in tags:
                attached[tag] = (image, tags[tag])
    parts = {part.digest: part for part in closure(origin, version.descriptor)}
    for _, descriptor in attached.values():
        parts.update({part.digest: part for part in closure(origin, descriptor)})
    blobs = [part for part in parts.values() if part.media_type not in MANIFESTS]
    manifests = [part for part in parts.values() if part.media_type in MANIFESTS]
    new_bytes = 0

    def send() -> None:
        nonlocal new_bytes
        new_bytes = _send_blobs(origin, target, blobs)

    def write() -> tuple[str, ...]:
        for part in manifests:
            target.write_blob(origin.blob(part), part.media_type)
        names = _names(origin, target, version)
        named = dict.fromkeys(names, version.descriptor)
        target.retag({**_attached(origin, target, attached), **named})
        return names

    return Copied(
        version=version,
        tags=dest.write_model(version.model, send, write),
        digest=version.descriptor.digest,
        size_bytes=sum(part.size_bytes for part in blobs),
        new_bytes=new_bytes,
    )


def _copy_images(source: Store, dest: Store, version: Version) -> Copied:
    """Write a version as images that can be mounted; see `copy_version`."""
    target = dest.layout(version.model)
    images: dict[str, tuple[Descriptor, ...]] = {}

    def send() -> None:
        for name in version.images:
            with scratch_folder() as scratch:
                folder, layers = Path(scratch, "artifact"), Path(scratch, "layers")
                layers.mkdir()
                artifact = source.pull(version, name, folder)
                images[name] = image_form(target, artifact, layers)

    def write() -> tuple[str, ...]:
        index = image_index(target, images)
        changes = {}
        for name, found in images.items():
            changes[f"{version.number}-{name}{IMAGE}"] = found[0]
        tags = [f"{tag}{IMAGE}" for tag in _names(source.layout(version.model), target, version)]
        target.retag({**changes, **dict.fromkeys(tags, index)})
        return (index.digest, *tags)

    digest, *tags = dest.write_model(version.model, send, write)
    sizes = {}
    for found in images.values():
        sizes.update({layer.digest: layer.size_bytes for layer in target.image(found[0]).layers})
    size_bytes = sum(sizes.values())
    return Copied(
        version=version,
        tags=tuple(tags),
        digest=digest,
        size_bytes=size_bytes,
        new_bytes=size_bytes,
    )


def closure(layout: Layout, descriptor: Descriptor) -> Iterator[Descriptor]:
    """All blobs and manifests that a manifest needs, and itself last."""
    if descriptor.media_type == MEDIA_INDEX:
        for child in layout.index(descriptor).manifests:
            yield from closure(layout, child)
    elif descriptor.media_type == MEDIA_IMAGE:
        image = layout.image(descriptor)
        yield image.config
        yield from image.layers
    yield descriptor


def _names(origin: Layout, target: Layout, version: Version) -> tuple[str, ...]:
    """The tags that name a version in the other store."""
    latest = origin.tags().get(LATEST)
    is_latest = latest is not None and latest.digest == version.descriptor.digest
    number = str(version.number)
    return (number, LATEST) if is_latest or LATEST not in target.tags() else (number,)


def _attached(
    origin: Layout,
    target: Layout,
    attached: Mapping[str, tuple[Descriptor, Descriptor]],
) -> dict[str, Descriptor]:
    """Tags of signatures and bundles; where the other store has some, both have theirs."""
    changes = {}
    known = target.tags()
    for tag, (image, descriptor) in attached.items():
        if tag not in known:
            changes[tag] = descriptor
        elif known[tag].digest != descriptor.digest and tag == referrers_tag(image):
            manifests = origin.index(descriptor).manifests
            changes[tag] = write_referrers(target, image, manifests)
        elif known[tag].digest != descriptor.digest:
            ours = signatures_of(target, image, origin=tag)
            theirs = signatures_of(origin, image, origin=tag)
            signed = [*(ours.signed if ours else ()), *(theirs.signed if theirs else ())]
            changes[tag] = target.write_signatures(tuple(dict.fromkeys(signed)))
    return changes


def _send_blobs(
    origin: Layout,
    target: Layout,
    blobs: Iterable[Descriptor],
) -> int:
    """Copy the blobs that a store lacks, several at once, and return their size."""

    def send(blob: Descriptor) -> int:
        if target.holds(blob) or target.mount(blob, origin):
            return 0
        transferred(0, blob.size_bytes)
        local = origin.local(digest=blob.digest, size_bytes=blob.size_bytes)
        target.write_file(local, blob)
        return blob.size_bytes

    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        return sum(pool.map(send, blobs))
