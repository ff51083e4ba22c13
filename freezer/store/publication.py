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
        tags, numbers = layout.tags(), self.store.versions(self.model)
        newest = self.store.version(f"{self.model}:{numbers[-1]}") if numbers else None
        before = self.store.version(self.model) if numbers else None
        same = newest if newest is not None and newest.source_key == self.source_key else None
        number = numbers[-1] + 1 if numbers else 1
        new = [self._image(layout, artifact, same, number) for artifact in self.artifacts]
        images = merged(same.index if same else (), merged(self.carried, new), self.decided)
        if same is not None and same.index == images:
            if before is not None and before.number < same.number:  # rolled back
                return same
            number, descriptor = same.number, tags[str(same.number)]
        else:
            descriptor = self._write_index(layout, images, number)
        served = merged(before.index if before else (), images, self.decided)
        latest = descriptor if served == images else self._write_index(layout, served, number)
        changed = {str(number): descriptor, LATEST: latest}
        digests = {tag: stored.digest for tag, stored in tags.items()}
        if any(digests.get(tag) != stored.digest for tag, stored in changed.items()):
            layout.write_tags({**tags, **changed})
        return Version(model=self.model, number=number, source_key=self.source_key, index=images)

    def _write_index(self, layout: Layout, images: Sequence[Descriptor], number: int) -> Descriptor:
        return layout.write_index(images, version=number, source_key=self.source_key)

    def _image(
        self, layout: Layout, artifact: Artifact, same: Version | None, number: int
    ) -> Descriptor:
        """The image of an artifact: the one that a version of the same source has, or a new one."""
        manifest = artifact.manifest
        for image in same.images_of(manifest.device_class) if same else ():
            known = manifest_of_image(layout, image, origin=f"{self.model}:{number}")
            if replace(known, version=manifest.version).to_bytes() == manifest.to_bytes():
                layout.write_files(artifact)
                return image
        return layout.write_image(artifact, version=number)
