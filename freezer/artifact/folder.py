"""An artifact folder: manifest.json beside payloads/, golden/ and evidence/. Imports no torch.

This is what `freeze --out` and `pull --dest` write, what MLflow holds, and what a C++ program reads. Every file but the manifest
is named in the manifest with its digest; nothing is opened before its digest was verified.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from freezer.artifact.manifest import FileRef, Manifest, Payload
from freezer.errors import IntegrityError, NotPublishedError
from freezer.files.atomic import move, sync, write_whole
from freezer.files.digest import digest_file, verify_file
from freezer.files.paths import check_inside

MANIFEST = "manifest.json"
GOLDEN_INPUTS = "golden/inputs.safetensors"
GOLDEN_OUTPUTS = "golden/outputs.safetensors"
OWN_OUTPUTS = "evidence/outputs.safetensors"
LATENCY_EVIDENCE = "evidence/latency.parquet"
DRIFT_EVIDENCE = "evidence/drift.parquet"

MEDIA_MANIFEST = "application/vnd.coldpress.manifest.v1+json"
MEDIA_PAYLOAD = "application/vnd.coldpress.payload.v1"
MEDIA_SAFETENSORS = "application/vnd.safetensors"
MEDIA_PARQUET = "application/vnd.apache.parquet"
MEDIA_TEXT = "text/plain"
MEDIA_JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """An artifact folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> Artifact:
        """The artifact in a folder; reads the manifest alone.

        Raises:
            NotPublishedError: the folder holds no manifest.json.
            IntegrityError: the manifest cannot be read, or names a file outside the folder.
        """
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise NotPublishedError(f"{folder} holds no {MANIFEST}; expected a folder that freeze or pull wrote") from None
        manifest = Manifest.from_bytes(data, origin=str(path))
        for item in manifest.contents:
            check_inside(item.path, origin=str(path))
        return cls(folder=folder, manifest=manifest)

    def verify(self, items: tuple[Payload | FileRef, ...] | None = None) -> None:
        """Compare files with their digests.

        Args:
            items: the files to verify; all by default.

        Raises:
            IntegrityError: a file is missing, or is not what was published.
        """
        for item in self.manifest.contents if items is None else items:
            verify_file(self.folder / item.path, digest=item.digest, size_bytes=item.size_bytes)

    def file(self, path: str) -> FileRef:
        """The manifest's record of one of its files.

        Raises:
            IntegrityError: the manifest names no such file.
        """
        for item in self.manifest.files:
            if item.path == path:
                return item
        raise IntegrityError(f"{self.folder / MANIFEST} names no {path}")


def folder_of(reference: str | Path) -> Path | None:
    """The artifact folder that a reference names: a path, or a text that can only be one; None for the name of a model."""
    path = Path(reference)
    given = isinstance(reference, Path) or os.sep in reference or reference in (".", "..")
    return path if given or (path / MANIFEST).is_file() else None


def write_artifact(manifest: Manifest, staging: Path, dest: Path) -> Artifact:
    """Write the manifest beside the files in `staging`, then move the whole folder to `dest` in one step.

    Args:
        manifest: of the files that `staging` already holds.
        staging: a folder on the same file system as `dest`; it is gone afterwards.
        dest: a folder that does not exist yet, or an empty one.

    Raises:
        FileExistsError: `dest` holds something.
    """
    for item in manifest.contents:
        sync(staging / item.path)
    write_whole(staging / MANIFEST, manifest.to_bytes())
    if dest.exists() and any(dest.iterdir()):
        raise FileExistsError(f"{dest} is not empty; name a new folder")
    move(staging, dest)
    return Artifact(folder=dest, manifest=manifest)


def file_ref(root: Path, path: str, media_type: str) -> FileRef:
    """The record of a file that `root` holds at `path`."""
    full = root / path
    return FileRef(path=path, digest=digest_file(full), size_bytes=full.stat().st_size, media_type=media_type)
