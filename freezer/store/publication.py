"""Write a new version of a model, under the lock of its layout. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.store.oci_layout import Descriptor, Layout
from freezer.store.versions import LATEST, Version, manifest_of_image, merged

if TYPE_CHECKING:
    from freezer.store.artifact_store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What a new version contains; see `Store.publish`."""

    store: Store
    model: str
    source_key: str
    artifacts: Sequence[Artifact]
    carried: Sequence[Descriptor]
    decided: Collection[str]

    def write(self) -> Version:
        """Publish a new version, unless it would equal the newest one; return it."""
        layout = self.store.layout(self.model)
        layout.begin()
        numbers, tags = self.store.versions(self.model), layout.tags()
        number = 1
        same = before = None
        if numbers:
            number = numbers[-1] + 1
            before = self.store.version(self.model)
            newest = self.store.version(f"{self.model}:{numbers[-1]}")
            if newest.source_key == self.source_key:
                same = newest
        new = [self._image(layout, artifact, same, number) for artifact in self.artifacts]
        replacing = merged(self.carried, new)
        images = merged(same.index if same else (), replacing, self.decided)
        if same is not None and same.index == images:
            if before is not None and before.number < same.number:  # rolled back
                return same
            number = same.number
            descriptor = tags[str(number)]
        else:
            descriptor = self._write_index(layout, images, number)
        served = merged(before.index if before else (), images, self.decided)
        latest = descriptor
        if served != images:
            latest = self._write_index(layout, served, number)
        changed = {str(number): descriptor, LATEST: latest}
        digests = {tag: stored.digest for tag, stored in tags.items()}
        if any(digests.get(tag) != stored.digest for tag, stored in changed.items()):
            layout.write_tags({**tags, **changed})
        return Version(
            model=self.model,
            number=number,
            source_key=self.source_key,
            index=images,
        )

    def _write_index(
        self,
        layout: Layout,
        images: Sequence[Descriptor],
        number: int,
    ) -> Descriptor:
        return layout.write_index(images, version=number, source_key=self.source_key)

    def _image(
        self,
        layout: Layout,
        artifact: Artifact,
        same: Version | None,
        number: int,
    ) -> Descriptor:
        """The image of an artifact: the one that a version of the same source has, or a new one."""
        manifest = artifact.manifest
        images = same.images_of(manifest.device_class) if same else ()
        for image in images:
            known = manifest_of_image(layout, image, origin=f"{self.model}:{number}")
            unpublished = replace(known, version=manifest.version)
            if unpublished.to_bytes() == manifest.to_bytes():
                layout.write_files(artifact)
                return image
        return layout.write_image(artifact, version=number)
