"""What a store has published: sizes, dates, digests and signatures, read from its indexes.

Imports no torch, reads no payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from freezer.codec import frozen
from freezer.errors import (
    ColdpressError,
    IntegrityError,
    NotPublishedError,
    StoreUnreachableError,
)
from freezer.store.artifact_store import Store
from freezer.store.oci_layout import Descriptor
from freezer.store.versions import LATEST, NUMBER, signature_tag, version_of

NUM_READERS = 32
"""Models that are read at once, since a bucket takes some milliseconds for each of a model's 5 or
more requests.
"""


@frozen
class ListedArtifact:
    """An artifact of a published version.

    Attributes:
        digest: of its image, which signatures name too.
        size_bytes: of all its files and the manifest; artifacts share files that are equal.
        engines: packages that it needs besides torch.
    """

    device_class: str
    digest: str
    size_bytes: int
    signed: bool
    engines: tuple[str, ...]


@frozen
class ListedVersion:
    """A published version.

    Attributes:
        tags: the number, `latest` or both. In stores of earlier releases `latest` may have kept the
            artifact of a class from an earlier version: then it is listed on its own.
        digest: of its index, which pins it: `MODEL@DIGEST`.
        published: when it was written to the store, in seconds since the epoch by the store's
            clock; 0 in a registry, which records no times.
        artifacts: artifacts sorted by device class, of each class best first.
    """

    model: str
    version: int
    tags: tuple[str, ...]
    digest: str
    published: float
    artifacts: tuple[ListedArtifact, ...]


def newest_versions(store: Store) -> tuple[list[ListedVersion], list[ColdpressError]]:
    """The latest version of each model, newest first, and the errors of models that are damaged.

    Raises:
        StoreUnreachableError: the store cannot be read.
    """
    listed, errors = [], []
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for latest in pool.map(partial(_latest, store), store.models()):
            if isinstance(latest, ListedVersion):
                listed.append(latest)
            else:
                errors.append(latest)
    listed.sort(key=lambda version: (-version.published, version.model))
    return listed, errors


def versions_of(store: Store, model: str) -> list[ListedVersion]:
    """All versions of a model, newest first.

    Raises:
        NotPublishedError: the store has no such model.
        IntegrityError: the store is damaged.
        StoreUnreachableError: the store cannot be read.
    """
    store.version(model)
    tags = store.layout(model).tags()
    latest = tags[LATEST].digest
    numbers = [tag for tag in tags if NUMBER.fullmatch(tag) and tags[tag].digest != latest]
    wanted = [LATEST, *sorted(numbers, key=int, reverse=True)]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(partial(_listed_version, store, model, tags), wanted))


def loss_of(
    store: Store,
    reference: str,
    device_class: str,
) -> str:
    """What the store lacks of the artifacts that a version has for a class, in one sentence; empty
    if it has all. Reads no payload.

    Raises:
        StoreUnreachableError: the store cannot be read.
    """
    try:
        version = store.version(reference)
        store.layout(version.model).check(version.images_of(device_class))
    except (IntegrityError, NotPublishedError) as error:
        return str(error)
    return ""


def _latest(store: Store, model: str) -> ListedVersion | ColdpressError:
    try:
        return _listed_version(store, model, store.layout(model).tags(), LATEST)
    except StoreUnreachableError:
        raise
    except ColdpressError as error:
        return error


def _listed_version(
    store: Store,
    model: str,
    tags: Mapping[str, Descriptor],
    tag: str,
) -> ListedVersion:
    layout, descriptor = store.layout(model), tags[tag]
    version = version_of(layout, tag, descriptor, store=store.uri)
    names = [
        name
        for name in (str(version.number), LATEST)
        if name in tags and tags[name].digest == descriptor.digest
    ]
    artifacts = []
    for image in version.index:
        content = layout.image(image)
        artifacts.append(
            ListedArtifact(
                device_class=image.device_class,
                digest=image.digest,
                size_bytes=sum(blob.size_bytes for blob in (content.config, *content.layers)),
                signed=signature_tag(image) in tags,
                engines=image.engines,
            )
        )
    return ListedVersion(
        model=model,
        version=version.number,
        tags=tuple(names),
        digest=descriptor.digest,
        published=layout.modified(descriptor),
        artifacts=tuple(artifacts),
    )
