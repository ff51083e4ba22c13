"""A store of artifacts: one OCI image layout per model. Imports no torch.

    STORE/<model>/oci-layout
    STORE/<model>/index.json             tags: one per version, plus latest
    STORE/<model>/blobs/sha256/<digest>

A version is an image index with one image manifest per device class, told apart by the annotation
`dev.coldpress.device-class`. Blobs are written first, index.json last and atomically, so that a reader never sees half a
version. Any tool that reads OCI layouts (skopeo, oras, cosign) reads a store.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from freezer.artifact import (
    MANIFEST,
    MEDIA_MANIFEST,
    MEDIA_PAYLOAD,
    Artifact,
    check_inside,
    fsync_file,
    link_or_copy,
    verify_file,
)
from freezer.errors import IntegrityError, NotPublishedError, StoreUnreachableError, UsageError
from freezer.manifest import FileRef, Manifest, Payload, digest_bytes
from freezer.signing import ANNOTATION, MEDIA_SIGNATURE, SIGNATURE, Signatures, Signed, is_by, signed_with

NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
"""What a model may be called: an OCI path component and an MLflow name at once."""

ARTIFACT_TYPE = "application/vnd.coldpress.frozen.v1"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_IMAGE = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
DEVICE_CLASS = "dev.coldpress.device-class"
MODEL = "dev.coldpress.model"
VERSION = "dev.coldpress.version"
SOURCE_KEY = "dev.coldpress.source-key"
TITLE = "org.opencontainers.image.title"
TAG = "org.opencontainers.image.ref.name"
SIGNED = ".sig"
"""The end of the tag of an image with signatures; `sha256-HEX` before it names what they are of."""

WORK = ".coldpress"
"""The folder of a store that is no model: ledger, candidates, locks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One published version of a model.

    Attributes:
        number: counted from 1.
        source_key: of the one source that all its artifacts were made from.
        images: by device class, the OCI descriptor of the image manifest.
    """

    model: str
    number: int
    source_key: str
    images: Mapping[str, Mapping[str, Any]]


class Store:
    """A store in a local folder.

    Reading methods raise StoreUnreachableError when the folder is not there, and NotPublishedError when a model or version is not.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, uri: str, *, create: bool = False) -> Store:
        """The store at a URI: a path, or `file:` and a path.

        Args:
            uri: where the store is.
            create: make the folder if it does not exist.

        Raises:
            StoreUnreachableError: there is no such folder, or it cannot be made.
            UsageError: the scheme is not one that this release can reach.
        """
        scheme, host = urlparse(uri).scheme, urlparse(uri).netloc
        if scheme not in ("", "file"):
            raise UsageError(f"store {uri!r}: scheme {scheme!r} is not supported by this release; name a local folder")
        if scheme and host not in ("", "localhost"):
            raise UsageError(f"store {uri!r} names the host {host!r}; a local folder is file:PATH or file:///PATH")
        root = Path(url2pathname(urlparse(uri).path) if scheme else uri).absolute()
        try:
            if create:
                (root / WORK).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnreachableError(f"store {uri!r} cannot be made: {error}; name a folder that can be written") from error
        if not root.is_dir():
            raise StoreUnreachableError(f"store {uri!r} is not there; run `python -m jobs.optimize` first, or mend --store")
        return cls(root)

    def models(self) -> list[str]:
        """The names of all models with a published version, sorted."""
        return sorted(path.parent.name for path in self.root.glob("*/index.json"))

    def versions(self, model: str) -> list[int]:
        """The numbers of a model's versions, ascending; none for a model that was never published."""
        return sorted(int(tag) for tag in self._tags(model) if tag.isdigit())

    def version(self, reference: str) -> Version:
        """The version that `MODEL`, `MODEL:latest` or `MODEL:3` names."""
        model, _, tag = reference.partition(":")
        tags = self._tags(model)
        if not tags:
            known = ", ".join(self.models()) or "none"
            raise NotPublishedError(f"model {model!r} is not in store {self.root}; published are: {known}")
        descriptor = tags.get(tag or "latest")
        if descriptor is None:
            known = ", ".join(sorted(name for name in tags if not name.endswith(SIGNED)))
            raise NotPublishedError(f"model {model!r} has no version {tag!r} in store {self.root}; it has: {known}")
        index = json.loads(self._blob(model, descriptor))
        return Version(
            model=model,
            number=int(index["annotations"][VERSION]),
            source_key=index["annotations"][SOURCE_KEY],
            images={image["annotations"][DEVICE_CLASS]: image for image in index["manifests"]},
        )

    def manifest(self, version: Version, device_class: str) -> Manifest:
        """The manifest of one artifact of a version."""
        origin = f"{version.model}:{version.number} for {device_class}"
        return Manifest.from_bytes(self.manifest_bytes(version, device_class), origin=origin)

    def manifest_bytes(self, version: Version, device_class: str) -> bytes:
        """The manifest.json of one artifact of a version, byte for byte."""
        return self._blob(version.model, self._image(version, device_class)["config"])

    def file(self, version: Version, item: FileRef) -> Path:
        """The store's own copy of one file of a version's artifact, its digest verified; read it, never write it.

        Args:
            version: of `version()`.
            item: of the artifact's manifest.

        Raises:
            IntegrityError: it is missing, or not what was published.
        """
        path = self._blob_path(version.model, item.digest)
        try:
            verify_file(path, digest=item.digest, size_bytes=item.size_bytes)
        except OSError as error:
            raise StoreUnreachableError(f"{path} cannot be read: {error}") from error
        return path

    def pull(self, version: Version, device_class: str, dest: Path) -> Artifact:
        """Copy one artifact into a folder, verifying every digest on the way.

        Args:
            version: of `version()`.
            device_class: one of its classes.
            dest: a folder that does not exist yet, or is empty; or one that already holds this very artifact, which is kept.

        Raises:
            IntegrityError: a blob is not what was published; `dest` is left as it was.
            UsageError: `dest` holds something else.
        """
        image = self._image(version, device_class)
        manifest_bytes = self._blob(version.model, image["config"])
        if dest.exists() and any(dest.iterdir()):
            if (dest / MANIFEST).exists() and (dest / MANIFEST).read_bytes() == manifest_bytes:
                artifact = Artifact.read(dest)
                artifact.verify()
                self._pull_signatures(version, device_class, dest)
                return artifact
            raise UsageError(f"{dest} is not empty; name a new folder with --dest")
        dest.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
        try:
            for layer in image["layers"]:
                self._copy_layer(version.model, layer, staging)
            (staging / MANIFEST).write_bytes(manifest_bytes)
            Artifact.read(staging).verify()
            self._pull_signatures(version, device_class, staging)
            staging.chmod(0o755)
            os.replace(staging, dest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Artifact.read(dest)

    def _pull_signatures(self, version: Version, device_class: str, folder: Path) -> None:
        found = self.signatures(version, device_class)
        if found is not None:
            _write_atomic(folder / SIGNATURE, found.to_bytes())

    def signatures(self, version: Version, device_class: str) -> Signatures | None:
        """The signatures of one artifact of a version; None where nobody has signed it.

        Raises:
            IntegrityError: a blob is not what was written.
        """
        self._image(version, device_class)
        found = self._tags(version.model).get(_signature_tag(version.images[device_class]))
        if found is None:
            return None
        layers = json.loads(self._blob(version.model, found))["layers"]
        signed = (Signed(self._blob(version.model, layer), b64decode(layer["annotations"][ANNOTATION])) for layer in layers)
        return Signatures(image=self._blob(version.model, version.images[device_class]), signed=tuple(signed))

    def sign(self, version: Version, device_class: str, key: Path) -> bool:
        """Sign one artifact of a version; whether anything was written: what the key has signed before stays as it is.

        Args:
            version: of `version()`.
            device_class: one of its classes.
            key: a private EC key on P-256, PEM.

        Raises:
            IntegrityError: the artifact is damaged, and nothing that should be vouched for.
            StoreUnreachableError: the store cannot be written.
            UsageError: the key is not as it must be.
        """
        model, image = version.model, version.images.get(device_class, {})
        for item in self.manifest(version, device_class).contents:
            verify_file(self._blob_path(model, item.digest), digest=item.digest, size_bytes=item.size_bytes)
        new = signed_with(key, image_digest=image["digest"], model=model)
        try:
            with self._locked(model):
                before = self.signatures(version, device_class)
                signed = before.signed if before is not None else ()
                if any(is_by(one, key) for one in signed):
                    return False
                self._write_signatures(model, image, (*signed, new))
        except OSError as error:
            raise StoreUnreachableError(f"store {self.root} cannot be written: {error}") from error
        return True

    def _write_signatures(self, model: str, image: Mapping[str, Any], signed: Sequence[Signed]) -> None:
        layers = [
            {
                **self._write_blob(model, one.payload, MEDIA_SIGNATURE),
                "annotations": {ANNOTATION: b64encode(one.signature).decode()},
            }
            for one in signed
        ]
        diffs = [layer["digest"] for layer in layers]
        config = {"architecture": "", "os": "", "config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MEDIA_IMAGE,
            "config": self._write_blob(model, _json_bytes(config), MEDIA_CONFIG),
            "layers": layers,
        }
        descriptor = self._write_blob(model, _json_bytes(manifest), MEDIA_IMAGE)
        self._write_layout(model, {**self._tags(model), _signature_tag(image): descriptor})

    def materialize(self, version: Version, device_class: str, scratch: Path) -> Artifact:
        """An artifact folder in `scratch` whose files are links to the store's own blobs; read it, never write it."""
        image = self._image(version, device_class)
        for layer in image["layers"]:
            path = scratch / _title(layer, version.model)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self._blob_path(version.model, layer["digest"]))
        (scratch / MANIFEST).write_bytes(self._blob(version.model, image["config"]))
        return Artifact.read(scratch)

    def publish(
        self,
        model: str,
        *,
        source_key: str,
        artifacts: Mapping[str, Artifact],
        carried: Mapping[str, Mapping[str, Any]],
        judged: Collection[str] | None = None,
    ) -> Version:
        """Publish a new version.

        Args:
            model: its name.
            source_key: of the source that all its artifacts were made from.
            artifacts: by device class, the new ones; their folders stay as they are.
            carried: by device class, image descriptors of the version before that are taken over unchanged.
            judged: the classes that have a verdict now. What the latest version of the same source holds for any other class is
                carried over too, also if another campaign has published it since `carried` was made up. None carries nothing more.

        Returns:
            The version. When nothing would differ from the latest version, that one is returned; of its blobs, those that are
            missing or damaged are written again.

        Raises:
            StoreUnreachableError: the store cannot be written (a full disk, no permission); no half version is visible.
        """
        if not NAME.fullmatch(model):
            raise UsageError(f"model {model!r}: a name must match {NAME.pattern}")
        try:
            with self._locked(model):
                return self._publish(model, source_key, artifacts, carried, judged)
        except OSError as error:
            raise StoreUnreachableError(f"store {self.root} cannot be written: {error}") from error

    def _publish(
        self,
        model: str,
        source_key: str,
        artifacts: Mapping[str, Artifact],
        carried: Mapping[str, Mapping[str, Any]],
        judged: Collection[str] | None,
    ) -> Version:
        folder = self.root / model
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        _remove_partial(folder)
        _write_atomic(folder / "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        numbers = self.versions(model)
        latest = self.version(model) if numbers else None
        number = (numbers[-1] if numbers else 0) + 1
        same_source = latest if latest is not None and latest.source_key == source_key else None
        others = same_source.images if same_source and judged is not None else {}
        images = {name: dict(image) for name, image in others.items() if name not in (judged or ())}
        images |= {name: dict(image) for name, image in carried.items()}
        for name, artifact in artifacts.items():
            if same_source and self._holds(same_source, name, artifact):
                images[name] = dict(same_source.images[name])
                for item in artifact.manifest.contents:
                    self._keep_file(model, artifact, item)
            else:
                images[name] = self._write_image(model, artifact, version=number)
        if same_source and _digests(same_source.images) == _digests(images):
            return same_source
        index = {
            "schemaVersion": 2,
            "mediaType": MEDIA_INDEX,
            "artifactType": ARTIFACT_TYPE,
            "manifests": [images[name] for name in sorted(images)],
            "annotations": {MODEL: model, VERSION: str(number), SOURCE_KEY: source_key},
        }
        descriptor = self._write_blob(model, _json_bytes(index), MEDIA_INDEX)
        self._write_layout(model, {**self._tags(model), str(number): descriptor, "latest": descriptor})
        return Version(model=model, number=number, source_key=source_key, images=images)

    def _write_layout(self, model: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Write index.json, which shows all tags at once; under the model's lock."""
        layout = {
            "schemaVersion": 2,
            "mediaType": MEDIA_INDEX,
            "manifests": [
                {**{k: v for k, v in tags[tag].items() if k != "annotations"}, "annotations": {TAG: tag}}
                for tag in sorted(tags, key=lambda tag: (not tag.isdigit(), int(tag) if tag.isdigit() else 0))
            ],
        }
        _write_atomic(self.root / model / "index.json", _json_bytes(layout))

    def _holds(self, version: Version, device_class: str, artifact: Artifact) -> bool:
        if device_class not in version.images:
            return False
        held = self.manifest(version, device_class)
        return replace(held, version=None).to_bytes() == replace(artifact.manifest, version=None).to_bytes()

    def _write_image(self, model: str, artifact: Artifact, *, version: int) -> dict[str, Any]:
        manifest = artifact.manifest
        layers = []
        for item in manifest.contents:
            media_type = item.media_type if isinstance(item, FileRef) else MEDIA_PAYLOAD
            self._keep_file(model, artifact, item)
            layers.append(
                {"mediaType": media_type, "digest": item.digest, "size": item.size_bytes, "annotations": {TITLE: item.path}}
            )
        config = self._write_blob(model, replace(manifest, version=version).to_bytes(), MEDIA_MANIFEST)
        image = {
            "schemaVersion": 2,
            "mediaType": MEDIA_IMAGE,
            "artifactType": ARTIFACT_TYPE,
            "config": config,
            "layers": layers,
            "annotations": {DEVICE_CLASS: manifest.device_class, MODEL: model},
        }
        descriptor = self._write_blob(model, _json_bytes(image), MEDIA_IMAGE)
        descriptor |= {"artifactType": ARTIFACT_TYPE, "annotations": {DEVICE_CLASS: manifest.device_class}}
        if manifest.device_class.startswith("cpu-x86-64"):
            descriptor["platform"] = {"architecture": "amd64", "os": "linux"}
        return descriptor

    def _keep_file(self, model: str, artifact: Artifact, item: FileRef | Payload) -> None:
        """Have a file of an artifact as a blob; one that is there already is trusted by its digest alone."""
        blob = self._blob_path(model, item.digest)
        try:
            verify_file(blob, digest=item.digest, size_bytes=item.size_bytes)
        except IntegrityError:  # missing or damaged
            verify_file(artifact.folder / item.path, digest=item.digest, size_bytes=item.size_bytes)
            partial = blob.with_name(f".{blob.name}.partial")
            self._take_in(artifact.folder / item.path, partial)
            partial.chmod(0o444)
            fsync_file(partial)
            os.replace(partial, blob)

    def _take_in(self, source: Path, partial: Path) -> None:
        """Link a file that this store's own workers made; copy any other, which its owner may change later."""
        if self.root / WORK in source.parents:
            link_or_copy(source, partial)
        else:
            shutil.copyfile(source, partial)

    def _write_blob(self, model: str, data: bytes, media_type: str) -> dict[str, Any]:
        digest = digest_bytes(data)
        path = self._blob_path(model, digest)
        if not path.exists() or path.read_bytes() != data:
            _write_atomic(path, data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def _image(self, version: Version, device_class: str) -> dict[str, Any]:
        descriptor = version.images.get(device_class)
        if descriptor is None:
            known = ", ".join(sorted(version.images))
            raise NotPublishedError(f"{version.model}:{version.number} has no artifact for {device_class}; it has: {known}")
        image: dict[str, Any] = json.loads(self._blob(version.model, descriptor))
        return image

    def _tags(self, model: str) -> dict[str, dict[str, Any]]:
        if not NAME.fullmatch(model):
            raise NotPublishedError(f"{model!r} is no model's name; expected {NAME.pattern}, optionally with :VERSION")
        path = self.root / model / "index.json"
        try:
            layout = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnreachableError(f"{path} cannot be read: {error}") from error
        except ValueError as error:
            raise IntegrityError(f"{path} is damaged: {error}") from None
        try:
            return {item["annotations"][TAG]: item for item in layout["manifests"] if TAG in item.get("annotations", {})}
        except (KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{path} is no OCI index: it lacks or misspells {error}") from None

    def _blob(self, model: str, descriptor: Mapping[str, Any]) -> bytes:
        path = self._blob_path(model, descriptor["digest"])
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise IntegrityError(f"{path} is missing; the store is damaged") from None
        except OSError as error:
            raise StoreUnreachableError(f"{path} cannot be read: {error}") from error
        if digest_bytes(data) != descriptor["digest"]:
            raise IntegrityError(f"{path} does not have the digest it is named by; it was changed or damaged")
        return data

    def _blob_path(self, model: str, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", value):
            raise IntegrityError(f"{digest!r} is no sha256 digest")
        return self.root / model / "blobs" / "sha256" / value

    def _copy_layer(self, model: str, layer: Mapping[str, Any], folder: Path) -> None:
        path = folder / _title(layer, model)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(self._blob_path(model, layer["digest"]), path)
        except FileNotFoundError:
            raise IntegrityError(f"blob {layer['digest']} of {model} is missing; the store is damaged") from None

    @contextmanager
    def _locked(self, model: str) -> Iterator[None]:
        locks = self.root / WORK / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / model).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _signature_tag(image: Mapping[str, Any]) -> str:
    return f"{image['digest'].replace(':', '-')}{SIGNED}"


def _remove_partial(folder: Path) -> None:
    """Remove what publishers of a model that were killed had begun to write; under its lock."""
    for path in (*folder.glob(".*"), *(folder / "blobs" / "sha256").glob(".*")):
        path.unlink(missing_ok=True)


def _title(layer: Mapping[str, Any], model: str) -> str:
    title: str = layer["annotations"][TITLE]
    check_inside(title, origin=f"a layer of {model}")
    return title


def _digests(images: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: image["digest"] for name, image in images.items()}


def _json_bytes(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode()


def _write_atomic(path: Path, data: bytes) -> None:
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    fsync_file(path.parent)
