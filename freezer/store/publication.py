"""Write a new version of a model, or roll `latest` back, under the lock of its layout. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.errors import IntegrityError, UsageError
from freezer.hardware import PORTABLE
from freezer.store.oci_layout import Descriptor, Layout
from freezer.store.versions import LATEST, Version, manifest_of_image, merged, version_of

if TYPE_CHECKING:
    from freezer.store.artifact_store import Store

BEFORE = "before-rollback"
"""Tag of what `latest` was before the last rollback, until a new version is published."""


def write_version(
    store: Store,
    model: str,
    source_key: str,
    artifacts: Sequence[Artifact],
    carried: Sequence[Descriptor],
    decided: Collection[str],
) -> Version:
    """Publish a new version, unless it would equal the newest one; see `Store.publish`."""
    layout = store.layout(model)
    layout.begin()
    numbers, tags = store.versions(model), layout.tags()
    number = numbers[-1] + 1 if numbers else 1
    same = before = None
    if numbers:
        before = store.find(model)
        newest = store.find(f"{model}:{numbers[-1]}")
        if newest is not None and newest.source_key == source_key:
            same = newest
    new = [_image(layout, artifact, same, number) for artifact in artifacts]
    images = merged(same.index if same else (), merged(carried, new), decided)
    if same is not None and same.index == images:
        if before is not None and before.number < same.number:  # rolled back
            return same
        number = same.number
    write_index = partial(layout.write_index, version=number, source_key=source_key)
    descriptor = tags.get(str(number)) or write_index(images)
    version = Version(
        model=model,
        number=number,
        source_key=source_key,
        index=images,
        descriptor=descriptor,
    )
    changed = [str(number)]
    if before is None or PORTABLE in version.images or PORTABLE not in before.images:
        changed.append(LATEST)  # what serves any machine, if `latest` did
    if any(tag not in tags or tags[tag].digest != descriptor.digest for tag in changed):
        layout.retag({**dict.fromkeys(changed, descriptor), BEFORE: None})
    return version


def _image(
    layout: Layout,
    artifact: Artifact,
    same: Version | None,
    number: int,
) -> Descriptor:
    """The image of an artifact: the one that a version of the same source has, or a new one."""
    manifest = artifact.manifest
    for image in same.images_of(manifest.device_class) if same else ():
        known = None
        with suppress(IntegrityError):  # it is lost, and written again
            known = manifest_of_image(layout, image, origin=image.digest)
        if known and replace(known, version=manifest.version).to_bytes() == manifest.to_bytes():
            layout.write_files(artifact)
            return image
    return layout.write_image(artifact, version=number)


def roll_back(store: Store, model: str, number: int | None) -> Version:
    """Make `latest` an earlier version, or what it was before the last rollback; see
    `Store.roll_back`.
    """
    layout = store.layout(model)
    tags = layout.tags(BEFORE, LATEST, str(number))
    wanted, before = tags.get(BEFORE), None
    if number is not None:
        store.version(f"{model}:{number}")  # raises if it is not there
        wanted, before = tags[str(number)], tags[LATEST]
    if wanted is None:
        raise UsageError(
            f"{model} was not rolled back since its last version or --undo; roll back to a version"
            f" that `coldpress list {model} --store {store.uri}` shows"
        )
    version = version_of(layout, LATEST, wanted, store=store.uri)
    layout.check(version.index)
    layout.retag({BEFORE: before, LATEST: wanted})
    return version
