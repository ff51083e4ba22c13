"""Published versions of a model: read from an OCI layout, copied into folders. Imports no torch."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from freezer.artifact import (
    ANNOTATION,
    MANIFEST,
    SIGNATURE,
    Artifact,
    Manifest,
    Signatures,
    Signed,
)
from freezer.codec import decode, frozen
from freezer.errors import IntegrityError, NotPublishedError, UsageError
from freezer.files import (
    DOCUMENT_BYTES,
    move,
    open_regular,
    read_document,
    scratch_folder,
    write_whole,
)
from freezer.store.oci_layout import (
    DEVICE_CLASS,
    MEDIA_INDEX,
    SOURCE_KEY,
    VERSION,
    Descriptor,
    Layout,
    MissingBlobError,
)

NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
"""Names of models: OCI path components that are MLflow names too."""

NUMBER = re.compile(r"[1-9][0-9]{0,8}")
"""Numbers of versions."""

LATEST = "latest"

SIGNED = ".sig"
"""Suffix of the tags of signatures: `sha256-HEX.sig` signs the image `sha256:HEX`."""


@frozen
class Version:
    """One published version of a model.

    Attributes:
        number: counted from 1.
        source_key: key of the source of all its artifacts.
        index: descriptors of all image manifests, by device class and best first.
        descriptor: of the OCI index that describes it.
    """

    model: str
    number: int
    source_key: str
    index: tuple[Descriptor, ...]
    descriptor: Descriptor = field(compare=False)

    @property
    def pin(self) -> str:
        """A reference to exactly this version, wherever it is copied."""
        return f"{self.model}@{self.descriptor.digest}"

    @property
    def images(self) -> dict[str, Descriptor]:
        """The best image of each device class."""
        return {image.device_class: image for image in reversed(self.index)}

    def images_of(self, device_class: str) -> tuple[Descriptor, ...]:
        """All images of a device class, best first."""
        return tuple(image for image in self.index if image.device_class == device_class)

    def image(self, device_class: str, rank: int) -> Descriptor:
        """The image of a device class at a position, best first.

        Raises:
            NotPublishedError: the version has none.
        """
        images = self.images_of(device_class)
        if rank < len(images):
            return images[rank]
        raise NotPublishedError(
            f"{self.model}:{self.number} has no artifact for {device_class}; it has:"
            f" {', '.join(sorted(self.images))}"
        )


def version_of(
    layout: Layout,
    tag: str,
    descriptor: Descriptor,
    *,
    store: str,
) -> Version:
    """The version that an index describes.

    Args:
        layout: of its model.
        tag: tag or digest that the index was found by.
        descriptor: of the index.
        store: URI of the store, for messages.

    Raises:
        IntegrityError: the index lacks annotations, or is of another version than the tag.
    """
    index = layout.index(descriptor)
    annotations = index.annotations
    number = annotations.get(VERSION, "")
    is_complete = SOURCE_KEY in annotations and all(image.device_class for image in index.manifests)
    right_number = number == tag or not NUMBER.fullmatch(tag)
    if not is_complete or not right_number or not NUMBER.fullmatch(number):
        raise IntegrityError(
            f"{store}: the index of {layout.model}:{tag} lacks {SOURCE_KEY} or a {DEVICE_CLASS},"
            " or is of another version; the store was changed or damaged"
        )
    return Version(
        model=layout.model,
        number=int(number),
        source_key=annotations[SOURCE_KEY],
        index=index.manifests,
        descriptor=descriptor,
    )


def pinned(layout: Layout, digest: str) -> Descriptor | None:
    """The index of a digest, read from the cache where that has it; None if it is not there.

    Raises:
        IntegrityError: the digest is malformed, or what it names is damaged.
    """
    asked = Descriptor(media_type=MEDIA_INDEX, digest=digest, size_bytes=DOCUMENT_BYTES)
    with suppress(MissingBlobError):
        return replace(asked, size_bytes=len(layout.blob(asked)))
    return None


def merged(
    earlier: Sequence[Descriptor],
    new: Sequence[Descriptor],
    decided: Collection[str] = (),
) -> tuple[Descriptor, ...]:
    """Images of a version with those of some classes replaced, sorted by class.

    Args:
        earlier: images to keep, of classes that are not replaced.
        new: images that replace all others of their classes.
        decided: further classes whose earlier images are left out.
    """
    replaced = set(decided)
    replaced.update(image.device_class for image in new)
    kept = [image for image in earlier if image.device_class not in replaced]
    return tuple(sorted([*kept, *new], key=lambda image: image.device_class))


def signature_tag(image: Descriptor) -> str:
    """The tag of the signatures of an image."""
    return f"{image.digest.replace(':', '-')}{SIGNED}"


def signatures_of(
    layout: Layout,
    image: Descriptor,
    *,
    origin: str,
) -> Signatures | None:
    """The signatures of an image; None if it is not signed."""
    tag = signature_tag(image)
    stored = layout.tags(tag).get(tag)
    if stored is None:
        return None
    signed = []
    for layer in layout.image(stored).layers:
        made = {
            "payload": b64encode(layout.blob(layer)).decode(),
            "signature": layer.annotations.get(ANNOTATION),
        }
        signed.append(decode(Signed, made, origin=origin))
    return Signatures(image=layout.blob(image), signed=tuple(signed))


def copy_image(
    layout: Layout,
    image: Descriptor,
    dest: Path,
    signatures: Signatures | None,
) -> Artifact:
    """Copy an artifact and its signatures, verified; see `Store.pull`."""
    data = layout.artifact_manifest(image)
    manifest = Manifest.from_bytes(data, origin=f"the manifest of {image.device_class}")
    try:
        if dest.exists() and any(dest.iterdir()):
            known = dest / MANIFEST
            if not known.exists() or read_document(known) != data:
                raise UsageError(f"{dest} is not empty; name a new folder with --dest")
            Artifact.read(dest).verify()
            _complete(dest, signatures)
        else:
            dest.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(place=dest.parent) as scratch:
                staging = scratch / "artifact"
                layout.bring(manifest.contents)
                for file in manifest.contents:
                    layout.fetch(file, staging / file.path)
                (staging / MANIFEST).write_bytes(data)
                _complete(staging, signatures)
                move(staging, dest)
    except OSError as error:
        raise UsageError(
            f"--dest {dest} cannot be written: {error.strerror or error}; free space, or name"
            " another folder"
        ) from error
    return Artifact.read(dest)


def _complete(
    folder: Path,
    signatures: Signatures | None,
) -> None:
    """Write the signatures of a pulled folder."""
    if signatures is not None:
        write_whole(folder / SIGNATURE, signatures.to_bytes(), mode=0o644)


def link_image(
    layout: Layout,
    image: Descriptor,
    folder: Path,
    paths: Collection[str] | None,
    stack: ExitStack | None,
) -> Artifact:
    """Make a folder of links to the blobs of an artifact; see `Store.materialize`."""
    data = layout.artifact_manifest(image)
    manifest = Manifest.from_bytes(data, origin=f"the manifest of {image.device_class}")
    folder.mkdir(parents=True, exist_ok=True)
    files = [file for file in manifest.contents if paths is None or file.path in paths]
    layout.bring(files)
    for file in files:
        link = folder / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = partial(layout.local, file)
        link.symlink_to(blob() if stack is None else _held(blob, stack))
    (folder / MANIFEST).write_bytes(data)
    return Artifact.read(folder)


def _held(blob: Callable[[], Path], stack: ExitStack) -> str:
    """The path of an open file of a blob, which stays valid if users delete the cache."""
    for _ in range(5):
        with suppress(FileNotFoundError):
            return f"/proc/self/fd/{stack.enter_context(open_regular(blob())).fileno()}"
    raise IntegrityError(f"{blob()} is missing; pull the artifact again, or repair the store")
