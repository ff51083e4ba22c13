"""The OCI image layout of one model: blobs by digest, and index.json that maps tags to versions.
Imports no torch.

Artifacts and signatures are written as OCI images, versions as OCI indexes. The files are in a
local folder (`LocalFiles`), in a bucket (`RemoteFiles`) or in a registry (`RegistryFiles`), all
with the same methods. Their paths are relative to the store and use `/`.
"""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from freezer.artifact import (
    ANNOTATION,
    MEDIA_MANIFEST,
    MEDIA_PAYLOAD,
    MEDIA_SIGNATURE,
    Artifact,
    FileRef,
    Payload,
    Signed,
)
from freezer.codec import OMIT_DEFAULT, encode, frozen, read_record, stored_as
from freezer.errors import IntegrityError, StoreUnreachableError
from freezer.files import (
    DOCUMENT_BYTES,
    check_digest,
    chunks_of,
    digest_bytes,
    open_regular,
    verify_file,
)
from freezer.hardware import PORTABLE
from freezer.progress import transferred

if TYPE_CHECKING:
    from freezer.store.bucket import RemoteFiles
    from freezer.store.local_files import LocalFiles
    from freezer.store.registry import RegistryFiles

    Files: TypeAlias = LocalFiles | RemoteFiles | RegistryFiles

ARTIFACT_TYPE = "application/vnd.coldpress.frozen.v1"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_IMAGE = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFESTS = (MEDIA_INDEX, MEDIA_IMAGE)
DEVICE_CLASS = "dev.coldpress.device-class"
MODEL = "dev.coldpress.model"
VERSION = "dev.coldpress.version"
SOURCE_KEY = "dev.coldpress.source-key"
ENGINES = "dev.coldpress.engines"
"""Annotation of an image that needs packages besides torch: their names, separated by commas."""
TITLE = "org.opencontainers.image.title"
TAG = "org.opencontainers.image.ref.name"
X86_LEVELS = ("v3", "v4")
NUM_TRANSFERS = 6
"""Blobs that are downloaded or uploaded at once."""
INDEX = "index.json"
_BLOBS = "blobs/sha256"


@frozen
class Descriptor:
    """An OCI descriptor: the media type, digest and size of a blob, and what describes it."""

    media_type: str = field(default="", metadata=stored_as("mediaType"))
    digest: str
    size_bytes: int = field(metadata=stored_as("size"))
    artifact_type: str = field(
        default="",
        metadata={**stored_as("artifactType"), **OMIT_DEFAULT},
    )
    annotations: Mapping[str, str] = field(
        default_factory=dict,
        metadata=OMIT_DEFAULT,
    )
    platform: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        check_digest(self.digest)

    @property
    def device_class(self) -> str:
        """Device class of an artifact's image; empty for other blobs."""
        return self.annotations.get(DEVICE_CLASS, "")

    @property
    def engines(self) -> tuple[str, ...]:
        """Packages that an artifact's image needs besides torch."""
        return tuple(filter(None, self.annotations.get(ENGINES, "").split(",")))


@frozen
class OciIndex:
    """An OCI index: of a model its tags, of a version its images."""

    manifests: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(
        default_factory=dict,
        metadata=OMIT_DEFAULT,
    )


@frozen
class OciImage:
    """An OCI image manifest: of an artifact, or of signatures."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


Blob: TypeAlias = Descriptor | FileRef | Payload
"""What names a blob by its digest and size."""


class OvertakenError(StoreUnreachableError):
    """Another writer wrote index.json at the same time, where locks are advisory; write again."""


class MissingBlobError(IntegrityError):
    """A store lacks a blob."""


class Layout:
    """The layout of one model in a store's files.

    Reading methods raise StoreUnreachableError when the store cannot be read, and IntegrityError
    for missing or damaged blobs. Writing methods raise OSError.
    """

    def __init__(
        self,
        files: Files,
        model: str,
    ) -> None:
        self._files, self.model = files, model
        self._index = f"{model}/{INDEX}"

    def tags(self, *names: str) -> Mapping[str, Descriptor]:
        """Descriptors by tag; empty if the model was never published.

        Args:
            names: tags that are enough; others may be left out. Default: all.
        """
        where = self._files.where(self._index)
        try:
            data = self._files.read(self._index)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error
        index = read_record(OciIndex, data, origin=where)
        return {
            descriptor.annotations[TAG]: descriptor
            for descriptor in index.manifests
            if TAG in descriptor.annotations
        }

    def blob(self, descriptor: Descriptor) -> bytes:
        """The verified content of a blob."""
        path = self.path(descriptor.digest, descriptor.media_type)
        with self._reading(path):
            data = self._files.read(path, min(descriptor.size_bytes, DOCUMENT_BYTES))
        if digest_bytes(data) != descriptor.digest:
            raise IntegrityError(
                f"{self._files.where(path)} does not have the digest it is named by; it was changed"
                " or damaged"
            )
        return data

    def modified(self, descriptor: Descriptor) -> float:
        """When a blob was written, in seconds since the epoch by the store's clock."""
        path = self.path(descriptor.digest, descriptor.media_type)
        with self._reading(path):
            return self._files.modified(path)

    def check(self, images: Iterable[Descriptor]) -> None:
        """Check that all files of images are there. Reads their manifests alone.

        Raises:
            IntegrityError: a file is missing, or a manifest is damaged.
        """
        for image in map(self.image, images):
            self.blob(image.config)
            for layer in image.layers:
                self.modified(layer)

    def index(self, descriptor: Descriptor) -> OciIndex:
        """The verified OCI index of a version, with each image once, sorted by class."""
        found = read_record(OciIndex, self.blob(descriptor), origin=descriptor.digest)
        images = {}
        for image in sorted(found.manifests, key=lambda image: image.device_class):
            images[image.digest, image.device_class] = replace(image, platform={})
        return replace(found, manifests=tuple(images.values()))

    def image(self, descriptor: Descriptor) -> OciImage:
        """A verified OCI image manifest: an artifact's, or of signatures."""
        return read_record(OciImage, self.blob(descriptor), origin=descriptor.digest)

    def artifact_manifest(self, image: Descriptor) -> bytes:
        """The manifest.json of the artifact in an image, byte for byte."""
        return self.blob(self.image(image).config)

    def bring(self, files: Iterable[Blob]) -> None:
        """Download blobs, several at once; nothing where the store is a local folder."""
        if self._files.exact:
            return
        unique = {file.digest: file for file in files}.values()
        transferred(0, sum(file.size_bytes for file in unique))
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            list(pool.map(self.local, unique))

    def local(self, blob: Blob) -> Path:
        """A read-only local file of a blob; the caller verifies its digest."""
        path = self.path(blob.digest)
        with self._reading(path):
            return self._files.local(path, digest=blob.digest, size_bytes=blob.size_bytes)

    def fetch(self, blob: Blob, dest: Path) -> None:
        """Copy a blob to a local file, and verify it.

        Raises:
            IntegrityError: it has another digest.
            OSError: the local file cannot be written.
        """
        source = self.local(blob)
        dest.parent.mkdir(parents=True, exist_ok=True)
        if not self._files.exact:  # a verified copy
            shutil.copyfile(source, dest)
            return
        with (
            self._reading(self.path(blob.digest)),
            open_regular(source) as file,
            dest.open("wb") as copy,
        ):
            copy.writelines(chunks_of(file, blob.size_bytes, source))
        verify_file(dest, digest=blob.digest, size_bytes=blob.size_bytes, origin=str(source))

    def begin(self) -> None:
        """Prepare the layout for writing, under the model's lock."""
        self._files.prepare(self.model)
        self._files.prepare(f"{self.model}/{_BLOBS}")
        self._files.write(f"{self.model}/oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    def write_files(self, artifact: Artifact) -> None:
        """Store the files of an artifact that the store lacks as blobs.

        Raises:
            IntegrityError: a file differs from the artifact's manifest.
        """
        for item in artifact.manifest.contents:
            descriptor = Descriptor(digest=item.digest, size_bytes=item.size_bytes)
            self.write_file(artifact.folder / item.path, descriptor)

    def write_image(self, artifact: Artifact, *, version: int) -> Descriptor:
        """Write an artifact whose files are stored as an image, first published in `version`, and
        return the descriptor of its image manifest.
        """
        manifest = replace(artifact.manifest, version=version)
        layers = []
        for file in manifest.contents:
            layers.append(
                Descriptor(
                    media_type=file.media_type if isinstance(file, FileRef) else MEDIA_PAYLOAD,
                    digest=file.digest,
                    size_bytes=file.size_bytes,
                    annotations={TITLE: file.path},
                )
            )
        config = self.write_blob(manifest.to_bytes(), MEDIA_MANIFEST)
        annotations = {DEVICE_CLASS: manifest.device_class}
        written = self.write_manifest(
            OciImage(config=config, layers=tuple(layers)),
            {"artifactType": ARTIFACT_TYPE, "annotations": {**annotations, MODEL: self.model}},
        )
        if manifest.engines:
            annotations[ENGINES] = ",".join(manifest.engines)
        return replace(written, artifact_type=ARTIFACT_TYPE, annotations=annotations)

    def write_index(
        self,
        images: Sequence[Descriptor],
        *,
        version: int,
        source_key: str,
    ) -> Descriptor:
        """Write the index of a version, and return its descriptor.

        Args:
            images: descriptors of the images, in the order of the index.
            version: number of the version.
            source_key: key of the source of all its artifacts.
        """
        placed = []
        for image in images:
            platforms = platforms_of(image.device_class)
            placed += [replace(image, platform=platform) for platform in platforms]
        placed.sort(key=lambda image: image.device_class != PORTABLE)  # clients take the first
        return self.write_manifest(
            OciIndex(
                manifests=tuple(placed),
                annotations={MODEL: self.model, VERSION: str(version), SOURCE_KEY: source_key},
            ),
            {"artifactType": ARTIFACT_TYPE},
        )

    def write_signatures(self, signed: Sequence[Signed]) -> Descriptor:
        """Write signatures as an image in cosign's form, and return its descriptor."""
        layers = []
        for signature in signed:
            layer = self.write_blob(signature.payload, MEDIA_SIGNATURE)
            text = b64encode(signature.signature).decode()
            layers.append(replace(layer, annotations={ANNOTATION: text}))
        rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
        config = {"architecture": "", "os": "", "config": {}, "rootfs": rootfs}
        return self.write_manifest(
            OciImage(config=self.write_json(config, MEDIA_CONFIG), layers=tuple(layers)), {}
        )

    def retag(self, changes: Mapping[str, Descriptor | None]) -> None:
        """Set and remove tags, under the model's lock.

        Args:
            changes: descriptors by tag; None removes a tag.

        Raises:
            OvertakenError: where the lock is advisory, another writer has replaced index.json.
        """
        tags = {tag: found for tag, found in {**self.tags(), **changes}.items() if found}
        manifests = [
            encode(replace(descriptor, annotations={TAG: tag})) for tag, descriptor in tags.items()
        ]
        layout = {"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": manifests}
        self._files.write(self._index, _json_bytes(layout))
        self._check_tags(tags)

    def _check_tags(self, expected: Mapping[str, Descriptor]) -> None:
        """Read tags back, where the lock is advisory."""
        if self._files.exact:
            return
        written = self.tags(*expected)
        for tag, descriptor in expected.items():
            found = written.get(tag)
            if tag != "latest" and (found is None or found.digest != descriptor.digest):
                where = self._files.where(self.model)
                raise OvertakenError(
                    f"{where} was overwritten by another writer and lacks {tag}; try again"
                )

    def write_blob(self, data: bytes, media_type: str) -> Descriptor:
        """Store bytes as a blob, and return its descriptor."""
        descriptor = Descriptor(
            media_type=media_type,
            digest=digest_bytes(data),
            size_bytes=len(data),
        )
        if not self.holds(descriptor):
            self._files.write(self.path(descriptor.digest, media_type), data)
        return descriptor

    def holds(self, descriptor: Descriptor) -> bool:
        """Whether the store has a blob, as far as can be checked without downloading it."""
        return self._files.holds(
            self.path(descriptor.digest, descriptor.media_type),
            digest=descriptor.digest,
            size_bytes=descriptor.size_bytes,
        )

    def mount(self, descriptor: Descriptor, other: Layout) -> bool:
        """Take a blob over from another layout without its bytes, where that is possible."""
        return False

    def write_file(self, source: Path, descriptor: Descriptor) -> None:
        """Store a local file as a blob, unless it is there.

        Raises:
            IntegrityError: the file differs from its descriptor.
        """
        if not self.holds(descriptor):
            verify_file(source, digest=descriptor.digest, size_bytes=descriptor.size_bytes)
            self._files.put(self.path(descriptor.digest), source)

    def write_json(
        self,
        data: Mapping[str, Any],
        media_type: str,
    ) -> Descriptor:
        """Store JSON as a blob, and return its descriptor."""
        return self.write_blob(_json_bytes(data), media_type)

    def write_manifest(
        self, content: OciImage | OciIndex, further: Mapping[str, Any]
    ) -> Descriptor:
        """Store an image manifest or an index with further fields, and return its descriptor."""
        media_type = MEDIA_INDEX if isinstance(content, OciIndex) else MEDIA_IMAGE
        document = {"schemaVersion": 2, "mediaType": media_type, **encode(content), **further}
        return self.write_json(document, media_type)

    def path(self, digest: str, media_type: str = "") -> str:
        """The path of a blob in the store's files."""
        return f"{self.model}/{_BLOBS}/{digest.removeprefix('sha256:')}"

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        where = self._files.where(path)
        try:
            yield
        except FileNotFoundError:
            raise MissingBlobError(f"{where} is missing; the store is damaged") from None
        except OSError as error:
            raise StoreUnreachableError(f"{where} cannot be read: {error}") from error


def platforms_of(device_class: str) -> tuple[Mapping[str, str], ...]:
    """The platforms that generic clients choose the artifact of a class by: `portable` runs on any
    CPU. Finer classes than the levels of x86-64, and GPUs, have none, so that no such client takes
    them.
    """
    amd64 = {"architecture": "amd64", "os": "linux"}
    if device_class == PORTABLE:
        return amd64, {**amd64, "architecture": "arm64"}
    level = device_class.removeprefix("cpu-x86-64-")
    return ({**amd64, "variant": level} if level in X86_LEVELS else {},)


def _json_bytes(data: Mapping[str, Any]) -> bytes:
    """The JSON of blobs and of index.json."""
    return json.dumps(data, indent=1, sort_keys=True).encode()
