"""Copy artifacts of a store into folders. Imports no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from freezer.artifact import MANIFEST, SIGNATURE, Artifact, Manifest, Signatures
from freezer.errors import UsageError
from freezer.files import move, write_whole
from freezer.store.oci_layout import Descriptor, Layout


def copy_image(
    layout: Layout,
    image: Descriptor,
    dest: Path,
    signatures: Signatures | None,
) -> Artifact:
    """Copy an artifact and its signatures, verified; see `Store.pull`."""
    data = layout.artifact_manifest(image)
    manifest = Manifest.from_bytes(data, origin=f"the manifest of {image.device_class}")
    with _writing(dest):
        if dest.exists() and any(dest.iterdir()):
            known = dest / MANIFEST
            if not known.exists() or known.read_bytes() != data:
                raise UsageError(f"{dest} is not empty; name a new folder with --dest")
            _complete(dest, signatures)
        else:
            dest.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{dest.name}-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=dest.parent) as scratch:
                staging = Path(scratch) / "artifact"
                for file in manifest.contents:
                    layout.fetch(file.digest, staging / file.path)
                (staging / MANIFEST).write_bytes(data)
                _complete(staging, signatures)
                move(staging, dest)
    return Artifact.read(dest)


@contextmanager
def _writing(dest: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--dest {dest} cannot be written: {error.strerror or error}; free space, or name"
            " another folder"
        ) from error


def _complete(
    folder: Path,
    signatures: Signatures | None,
) -> None:
    """Verify a pulled folder, and write its signatures."""
    Artifact.read(folder).verify()
    if signatures is not None:
        write_whole(folder / SIGNATURE, signatures.to_bytes(), mode=0o644)


def link_image(
    layout: Layout,
    image: Descriptor,
    folder: Path,
    paths: Collection[str] | None,
) -> Artifact:
    """Make a folder of links to the blobs of an artifact; see `Store.materialize`."""
    data = layout.artifact_manifest(image)
    manifest = Manifest.from_bytes(data, origin=f"the manifest of {image.device_class}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in manifest.contents:
        if paths is None or file.path in paths:
            link = folder / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            blob = layout.local(digest=file.digest, size_bytes=file.size_bytes)
            link.symlink_to(blob)
    (folder / MANIFEST).write_bytes(data)
    return Artifact.read(folder)
