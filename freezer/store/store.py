"""A store of artifacts: one OCI image layout per model, in a local folder or a bucket. Imports no torch.

    STORE/<model>/oci-layout
    STORE/<model>/index.json             tags: one per version, plus latest
    STORE/<model>/blobs/sha256/<digest>

A version is an image index with one image manifest per device class, told apart by the annotation
`dev.coldpress.device-class`. Blobs are written first, index.json last and atomically, so that a reader never sees half a
version. Any tool that reads OCI layouts (skopeo, oras, cosign) reads a store.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlparse

from freezer.artifact.folder import MANIFEST, Artifact
from freezer.artifact.manifest import FileRef, Manifest
from freezer.artifact.signatures import ANNOTATION, SIGNATURE, Signatures, Signed, is_by, signed_with
from freezer.errors import NotPublishedError, StoreUnreachableError, UsageError
from freezer.files.atomic import make_folder, move, write_whole
from freezer.files.buckets import SCHEMES, open_bucket
from freezer.files.paths import check_inside
from freezer.store.backend import LocalFiles, StoreFiles
from freezer.store.blob_cache import cache_folder
from freezer.store.oci_images import DEVICE_CLASS, SOURCE_KEY, TITLE, VERSION, write_image, write_index, write_signatures
from freezer.store.oci_layout import INDEX, Layout, OvertakenError

if TYPE_CHECKING:
    from freezer.store.bucket import RemoteFiles

T = TypeVar("T")

NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
"""What a model may be called: an OCI path component and an MLflow name at once."""

SIGNED = ".sig"
"""The end of the tag of an image with signatures; `sha256-HEX` before it names what they are of."""

TRIES = 3
"""Of a write that another overtook, where locks are advisory."""

_OCI = {"oci": "; to a registry it is copied by skopeo or oras"}

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
    """A store.

    Reading methods raise StoreUnreachableError when the store is not there, and NotPublishedError when a model or version is not.

    Args:
        root: the store's folder; of one in a bucket a folder of this machine's for work on it, which need not be there.
        remote: the bucket.

    Attributes:
        uri: what it is opened by.
    """

    def __init__(self, root: Path, remote: RemoteFiles | None = None) -> None:
        self.root, self.remote = root, remote
        self._files: StoreFiles = remote or LocalFiles(root, work=WORK)
        self.uri = self._files.where()

    @classmethod
    def open(cls, uri: str, *, create: bool = False) -> Store:
        """The store at a URI: a path, `file:` and a path, or a place in a bucket as freezer/files/buckets.py has it.

        Args:
            uri: where the store is.
            create: make the folder if it does not exist; a bucket must be there.

        Raises:
            StoreUnreachableError: there is no such folder, or it cannot be made; the bucket is not there, or not reached.
            UsageError: the scheme is not one that this release can reach.
            MissingDependencyError: it is in a bucket, and pyarrow is not installed.
        """
        if urlparse(uri).scheme in SCHEMES:
            from freezer.store.bucket import RemoteFiles

            root = cache_folder() / "work" / hashlib.sha256(uri.encode()).hexdigest()[:16]
            return cls(root, RemoteFiles(open_bucket(uri), work=WORK))
        root = _local_folder(uri)
        try:
            if create:
                make_folder(root / WORK)
        except OSError as error:
            raise StoreUnreachableError(f"store {uri!r} cannot be made: {error}; name a folder that can be written") from error
        if not root.is_dir():
            raise StoreUnreachableError(f"store {uri!r} is not there; run `python -m jobs.optimize` first, or mend --store")
        return cls(root)

    def models(self) -> list[str]:
        """The names of all models with a published version, sorted."""
        return self._files.folders_with(INDEX)

    def versions(self, model: str) -> list[int]:
        """The numbers of a model's versions, ascending; none for a model that was never published."""
        return sorted(int(tag) for tag in self._layout(model).tags() if tag.isdigit())

    def version(self, reference: str) -> Version:
        """The version that `MODEL`, `MODEL:latest` or `MODEL:3` names."""
        model, _, tag = reference.partition(":")
        tags = self._layout(model).tags()
        if not tags:
            known = ", ".join(self.models()) or "none"
            raise NotPublishedError(f"model {model!r} is not in store {self.uri}; published are: {known}")
        descriptor = tags.get(tag or "latest")
        if descriptor is None:
            known = ", ".join(sorted(name for name in tags if not name.endswith(SIGNED)))
            raise NotPublishedError(f"model {model!r} has no version {tag!r} in store {self.uri}; it has: {known}")
        index = json.loads(self._layout(model).blob(descriptor))
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
        return self._layout(version.model).blob(self._image(version, device_class)["config"])

    def file(self, version: Version, item: FileRef) -> Path:
        """A local copy of one file of a version's artifact, its digest verified; of a folder its own. Read it, never write it.

        Args:
            version: of `version()`.
            item: of the artifact's manifest.

        Raises:
            IntegrityError: it is missing, or not what was published.
        """
        return self._layout(version.model).verified(digest=item.digest, size_bytes=item.size_bytes)

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
        image, layout = self._image(version, device_class), self._layout(version.model)
        manifest_bytes = layout.blob(image["config"])
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
                layout.fetch(layer["digest"], staging / _title(layer, version.model))
            (staging / MANIFEST).write_bytes(manifest_bytes)
            Artifact.read(staging).verify()
            self._pull_signatures(version, device_class, staging)
            staging.chmod(0o755)
            move(staging, dest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Artifact.read(dest)

    def _pull_signatures(self, version: Version, device_class: str, folder: Path) -> None:
        found = self.signatures(version, device_class)
        if found is not None:
            write_whole(folder / SIGNATURE, found.to_bytes(), mode=0o644)

    def signatures(self, version: Version, device_class: str) -> Signatures | None:
        """The signatures of one artifact of a version; None where nobody has signed it.

        Raises:
            IntegrityError: a blob is not what was written.
        """
        self._image(version, device_class)
        layout = self._layout(version.model)
        found = layout.tags().get(_signature_tag(version.images[device_class]))
        if found is None:
            return None
        layers = json.loads(layout.blob(found))["layers"]
        signed = (Signed(layout.blob(layer), b64decode(layer["annotations"][ANNOTATION])) for layer in layers)
        return Signatures(image=layout.blob(version.images[device_class]), signed=tuple(signed))

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
            self._layout(model).verified(digest=item.digest, size_bytes=item.size_bytes)
        new = signed_with(key, image_digest=image["digest"], model=model)

        def write() -> bool:
            before = self.signatures(version, device_class)
            signed = before.signed if before is not None else ()
            if any(is_by(one, key) for one in signed):
                return False
            layout = self._layout(model)
            layout.write_tags({**layout.tags(), _signature_tag(image): write_signatures(layout, (*signed, new))})
            return True

        return self._written(model, write)

    def _written(self, model: str, write: Callable[[], T]) -> T:
        """What writes a model's tags, done under its lock; done again where that is advisory and another wrote at the same time.

        Raises:
            StoreUnreachableError: the store cannot be written.
        """
        for left in reversed(range(TRIES)):
            try:
                with self._files.locked(model):
                    return write()
            except OvertakenError as error:
                if not left:
                    raise StoreUnreachableError(str(error)) from error
            except OSError as error:
                raise StoreUnreachableError(f"store {self.uri} cannot be written: {error}") from error
        raise AssertionError("unreachable")

    def materialize(self, version: Version, device_class: str, scratch: Path, *, paths: Collection[str] | None = None) -> Artifact:
        """An artifact folder in `scratch` whose files are links to the store's own blobs; read it, never write it.

        Args:
            version: of `version()`.
            device_class: one of its classes.
            scratch: an empty folder.
            paths: of the files that are needed; the others are left out. None means all.
        """
        image, layout = self._image(version, device_class), self._layout(version.model)
        for layer in image["layers"]:
            if paths is not None and _title(layer, version.model) not in paths:
                continue
            path = scratch / _title(layer, version.model)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(layout.local(digest=layer["digest"], size_bytes=layer["size"]))
        (scratch / MANIFEST).write_bytes(layout.blob(image["config"]))
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
        if not self._files.exact:
            self._send_ahead(model, artifacts.values())
        return self._written(model, lambda: self._publish(model, source_key, artifacts, carried, judged))

    def _send_ahead(self, model: str, artifacts: Iterable[Artifact]) -> None:
        """Have the large blobs in the store before the lock is taken, which is not to be held for long."""
        try:
            for artifact in artifacts:
                for item in artifact.manifest.contents:
                    self._layout(model).keep_file(artifact.folder / item.path, item)
        except OSError as error:
            raise StoreUnreachableError(f"store {self.uri} cannot be written: {error}") from error

    def _publish(
        self,
        model: str,
        source_key: str,
        artifacts: Mapping[str, Artifact],
        carried: Mapping[str, Mapping[str, Any]],
        judged: Collection[str] | None,
    ) -> Version:
        layout = self._layout(model)
        layout.begin()
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
                    layout.keep_file(artifact.folder / item.path, item)
            else:
                images[name] = write_image(layout, model, artifact, version=number)
        if same_source and _digests(same_source.images) == _digests(images):
            return same_source
        descriptor = write_index(layout, model, images, version=number, source_key=source_key)
        layout.write_tags({**layout.tags(), str(number): descriptor, "latest": descriptor})
        return Version(model=model, number=number, source_key=source_key, images=images)

    def _holds(self, version: Version, device_class: str, artifact: Artifact) -> bool:
        if device_class not in version.images:
            return False
        held = self.manifest(version, device_class)
        return replace(held, version=None).to_bytes() == replace(artifact.manifest, version=None).to_bytes()

    def _image(self, version: Version, device_class: str) -> dict[str, Any]:
        descriptor = version.images.get(device_class)
        if descriptor is None:
            known = ", ".join(sorted(version.images))
            raise NotPublishedError(f"{version.model}:{version.number} has no artifact for {device_class}; it has: {known}")
        image: dict[str, Any] = json.loads(self._layout(version.model).blob(descriptor))
        return image

    def _layout(self, model: str) -> Layout:
        if not NAME.fullmatch(model):
            raise NotPublishedError(f"{model!r} is no model's name; expected {NAME.pattern}, optionally with :VERSION")
        return Layout(self._files, model)


def one_spelling(uri: str) -> str:
    """A store's URI as it is for all its spellings: `/s`, `/s/` and `file:///s` are one store, and so are `s3://b/p` and `s3://b/p/`.

    Of a bucket's options the endpoint alone says which store it is. Nothing is opened.

    Raises:
        UsageError: the scheme is not one that this release can reach.
    """
    parts = urlparse(uri)
    if parts.scheme not in SCHEMES:
        return str(_local_folder(uri))
    base = unquote(f"{parts.netloc.removeprefix('anonymous@')}{parts.path}").strip("/")
    endpoint = dict(parse_qsl(parts.query)).get("endpoint_override")
    return f"{parts.scheme}://{base}" + (f"?endpoint_override={endpoint}" if endpoint else "")


def _local_folder(uri: str) -> Path:
    """The folder that a URI without a bucket names.

    Raises:
        UsageError: it names none.
    """
    scheme, host = urlparse(uri).scheme, urlparse(uri).netloc
    if scheme not in ("", "file"):
        raise UsageError(
            f"store {uri!r}: scheme {scheme!r} is none of a store; name a local folder, s3:// or gs://{_OCI.get(scheme, '')}"
        )
    if scheme and host not in ("", "localhost"):
        raise UsageError(f"store {uri!r} names the host {host!r}; a local folder is file:PATH or file:///PATH")
    return Path(unquote(urlparse(uri).path) if scheme else uri).absolute()


def _signature_tag(image: Mapping[str, Any]) -> str:
    return f"{image['digest'].replace(':', '-')}{SIGNED}"


def _title(layer: Mapping[str, Any], model: str) -> str:
    title: str = layer["annotations"][TITLE]
    check_inside(title, origin=f"a layer of {model}")
    return title


def _digests(images: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: image["digest"] for name, image in images.items()}
