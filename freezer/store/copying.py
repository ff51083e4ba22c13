"""Copy versions between stores, byte for byte, with their signatures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Literal

from freezer.artifact import Signed
from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.files import scratch_folder
from freezer.hardware import PORTABLE
from freezer.progress import transferred
from freezer.store.artifact_store import Store
from freezer.store.forms import IMAGE, image_form, referrers_tag, write_referrers
from freezer.store.oci_layout import (
    MANIFESTS,
    MEDIA_IMAGE,
    MEDIA_INDEX,
    NUM_TRANSFERS,
    Descriptor,
    Layout,
    OciIndex,
)
from freezer.store.versions import LATEST, Version, signature_tag, signatures_of

Form = Literal["artifacts", "image"]


@frozen
class Copied:
    """A version in the store that it was copied to.

    Attributes:
        names: the references that name it there.
        pin: the one that names its content.
    """

    names: tuple[str, ...]
    pin: str


def references(store: Store) -> Iterator[str]:
    """References of all versions of all models of a store, of each model `latest` first: readers of
    the copy never get another one as such.
    """
    for model in store.models():
        latest = store.version(model).number
        numbers = sorted(store.versions(model), key=lambda number: number != latest)
        yield from (f"{model}:{number}" for number in numbers)


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
    copy = _copy_images if form == "image" else _copy_artifacts
    tags, digest = copy(source, dest, version)
    names = tuple(f"{version.model}:{tag}" for tag in tags)
    return Copied(names=names, pin=f"{version.model}@{digest}")


def _copy_artifacts(source: Store, dest: Store, version: Version) -> tuple[list[str], str]:
    """Copy a version with all that is attached to it; return its tags and digest."""
    origin, target = source.layout(version.model), dest.layout(version.model)
    number, digest = str(version.number), version.descriptor.digest
    known = target.tags(number).get(number)
    if known is not None and known.digest != digest:
        raise UsageError(
            f"{dest.uri} has another {version.model}:{number} ({known.digest}) than {source.uri}"
            f" ({digest}); copy to another place, or publish it there as a new version"
        )
    parts = list(closure(origin, version.descriptor))
    for image in version.index:
        for descriptor in origin.tags(signature_tag(image), referrers_tag(image)).values():
            parts += closure(origin, descriptor)
    unique = {part.digest: part for part in parts}.values()

    def send() -> None:
        blobs = [part for part in unique if part.media_type not in MANIFESTS]
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            list(pool.map(partial(_send, origin, target), blobs))

    def write() -> list[str]:
        for part in unique:
            if part.media_type in MANIFESTS:
                target.write_blob(origin.blob(part), part.media_type)
        changes: dict[str, Descriptor] = {}
        for image in version.index:
            changes.update(_attached(origin, target, image))
        tags = _tags(origin, target, version)
        target.retag({**changes, **dict.fromkeys(tags, version.descriptor)})
        return tags

    return dest.write_model(version.model, send, write), digest


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


def _send(origin: Layout, target: Layout, blob: Descriptor) -> None:
    """Copy a blob that a store lacks."""
    if not target.holds(blob) and not target.mount(blob, origin):
        transferred(0, blob.size_bytes)
        target.write_file(origin.local(blob), blob)


def _tags(origin: Layout, target: Layout, version: Version) -> list[str]:
    """The tags that name a version in the other store."""
    latest = origin.tags(LATEST).get(LATEST)
    is_latest = latest is not None and latest.digest == version.descriptor.digest
    number = str(version.number)
    return [number, LATEST] if is_latest or LATEST not in target.tags(LATEST) else [number]


def _attached(
    origin: Layout,
    target: Layout,
    image: Descriptor,
) -> Iterable[tuple[str, Descriptor]]:
    """Tags of an image's signatures; where the other store has some, both have theirs."""
    names = signature_tag(image), referrers_tag(image)
    new, known = origin.tags(*names), target.tags(*names)
    for tag in names:
        if tag not in new:
            continue
        if tag not in known:
            yield tag, new[tag]
        elif tag == referrers_tag(image):
            yield tag, write_referrers(target, image, origin.index(new[tag]).manifests)
        else:
            signed: list[Signed] = []
            for layout in (target, origin):
                found = signatures_of(layout, image, origin=tag)
                signed += found.signed if found else ()
            yield tag, target.write_signatures(tuple(dict.fromkeys(signed)))


def _copy_images(source: Store, dest: Store, version: Version) -> tuple[list[str], str]:
    """Write a version as images that can be mounted; return their tags and the index's digest."""
    target = dest.layout(version.model)
    images: dict[str, tuple[Descriptor, ...]] = {}
    classes = sorted(version.images, key=lambda name: name != PORTABLE)

    def send() -> None:
        for name in classes[len(images) :]:
            with scratch_folder() as scratch:
                artifact = source.pull(version, name, scratch / "artifact")
                images[name] = image_form(target, artifact, scratch / "layer.tar")

    def write() -> tuple[list[str], str]:
        index = target.write_manifest(
            OciIndex(manifests=tuple(chain.from_iterable(images.values()))), {}
        )
        changes = {f"{version.number}-{name}{IMAGE}": images[name][0] for name in classes}
        origin = source.layout(version.model)
        tags = [f"{tag}{IMAGE}" for tag in _tags(origin, target, version)]
        target.retag({**changes, **dict.fromkeys(tags, index)})
        return tags, index.digest

    return dest.write_model(version.model, send, write)
