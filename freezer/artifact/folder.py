"""Artifact folders: manifest.json beside payloads/, golden/ and evidence/. Imports no torch.

Written by `freeze --out` and `pull --dest`, stored in MLflow, and read by C++ programs. The
manifest lists every other file with its digest; files are interpreted only after their digest was
verified.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from freezer.artifact.manifest import FileRef, Manifest, Payload
from freezer.codec import frozen
from freezer.errors import NotPublishedError
from freezer.files import (
    artifact_errors,
    digest_file,
    move,
    open_regular,
    read_document,
    scratch_folder,
    sync,
    verify_file,
    write_whole,
)
from freezer.spec import Point

MANIFEST = "manifest.json"
GOLDEN_INPUTS = "golden/inputs.safetensors"
GOLDEN_EAGER = "golden/eager.safetensors"
"""Eager's answers on the samples that a lower precision was judged on."""
GOLDEN_OUTPUTS = "golden/outputs.safetensors"

MEDIA_MANIFEST = "application/vnd.coldpress.manifest.v1+json"
MEDIA_PAYLOAD = "application/vnd.coldpress.payload.v1"
MEDIA_WEIGHTS = "application/vnd.coldpress.weights.v1"
MEDIA_SAFETENSORS = "application/vnd.safetensors"
MEDIA_PARQUET = "application/vnd.apache.parquet"
MEDIA_TEXT = "text/plain"
MEDIA_JSON = "application/json"


@frozen
class Artifact:
    """An artifact folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> Artifact:
        """Read the manifest of an artifact folder.

        Raises:
            NotPublishedError: the folder contains no manifest.json.
            IntegrityError: the manifest is damaged, or names a file outside the folder.
        """
        path = folder / MANIFEST
        with artifact_errors(path):
            if not path.exists():
                raise NotPublishedError(
                    f"{folder} contains no {MANIFEST}; expected a folder written by freeze or pull"
                )
            data = read_document(path)
        return cls(
            folder=folder,
            manifest=Manifest.from_bytes(data, origin=str(path)),
        )

    def verify(self, items: tuple[Payload | FileRef, ...] | None = None) -> None:
        """Compare some files, by default all, with their digests.

        Raises:
            IntegrityError: a file is missing or differs.
        """
        for item in self.manifest.contents if items is None else items:
            path = self.folder / item.path
            verify_file(
                path,
                digest=item.digest,
                size_bytes=item.size_bytes,
                origin=str(path.resolve()),
            )

    def held(
        self,
        paths: Collection[str],
        stack: ExitStack,
        *,
        private: bool = False,
    ) -> Artifact:
        """This artifact with some files that cannot be exchanged any more, in a temporary folder.
        Their digests are not verified yet.

        Args:
            paths: the files.
            stack: owns the folder.
            private: copy the files, so that they cannot be overwritten either. Otherwise the folder
                links to the open files, and processes that map the same file share its memory.

        Raises:
            IntegrityError: a file is missing.
            UsageError: no temporary folder can be written.
        """
        folder = stack.enter_context(scratch_folder())
        for item in self.manifest.contents:
            if item.path in paths:
                origin, link = self.folder / item.path, folder / item.path
                with artifact_errors(origin):
                    opened = stack.enter_context(open_regular(origin)).fileno()
                link.parent.mkdir(parents=True, exist_ok=True)
                file = Path(f"/proc/self/fd/{opened}")
                if private and file.stat().st_size == item.size_bytes:
                    shutil.copyfile(file, link)
                else:
                    link.symlink_to(file)
        return Artifact(folder=folder, manifest=self.manifest)


def folder_of(reference: str | Path) -> Path | None:
    """The folder that a reference names; None for the name of a model."""
    path = Path(reference)
    given = isinstance(reference, Path) or os.sep in reference or reference in (".", "..")
    return path if given or (path / MANIFEST).is_file() else None


def torch_folder(folder: Path) -> Path:
    """The folder beside an artifact that needs an engine, for the one that needs torch alone."""
    return folder.with_name(f"{folder.name}.torch")


def read_artifacts(folder: Path) -> tuple[Artifact, ...]:
    """Read the artifact of a folder and, if there is one for the same class and weights, the one
    beside it that needs torch alone; best first.

    Raises:
        NotPublishedError, IntegrityError: see `Artifact.read`.
    """
    best, beside = Artifact.read(folder), torch_folder(folder)
    if not best.manifest.engines or not (beside / MANIFEST).is_file():
        return (best,)
    other = Artifact.read(beside)
    return (best, other) if _origin(other) == _origin(best) else (best,)


def _origin(artifact: Artifact) -> tuple[object, ...]:
    manifest = artifact.manifest
    return manifest.model, manifest.device_class, manifest.provenance.get("weights")


def write_artifact(
    manifest: Manifest,
    staging: Path,
    dest: Path,
) -> Artifact:
    """Write the manifest into `staging`, and move that folder to `dest` atomically.

    Args:
        manifest: of the files in `staging`.
        staging: a folder on the file system of `dest`.
        dest: a new or empty folder.

    Raises:
        OSError: `dest` is not empty.
    """
    for item in manifest.contents:
        sync(staging / item.path)
    write_whole(staging / MANIFEST, manifest.to_bytes())
    move(staging, dest)
    return Artifact(
        folder=dest,
        manifest=manifest,
    )


def file_ref(
    root: Path,
    path: str,
    media_type: str,
) -> FileRef:
    """Make the record of the file at `path` in `root`."""
    full = root / path
    return FileRef(
        path=path,
        digest=digest_file(full),
        size_bytes=full.stat().st_size,
        media_type=media_type,
    )


def thread_counts_of(payloads: Iterable[Payload]) -> tuple[int, ...]:
    """Thread counts that payloads are made for, ascending; payloads for any count do not appear."""
    counts = {payload.num_threads for payload in payloads}
    return tuple(sorted(count for count in counts if count is not None))


def payloads_for_threads(
    payloads: Iterable[Payload],
    num_threads: int,
) -> tuple[Payload, ...]:
    """Payloads for exactly this thread count or for any, most specific first."""
    return tuple(payload for payload in payloads if payload.num_threads in (None, num_threads))


def payloads_within(
    payloads: Sequence[Payload],
    budget: int,
) -> tuple[Payload, ...]:
    """Payloads for a process that may use `budget` threads; empty if all need more.

    Selects the largest thread count within the budget: fewer threads are slow, more would wait for
    each other. Payloads for any count serve alone only where none is made for a count.
    """
    counts = thread_counts_of(payloads)
    if not counts:
        return payloads_for_threads(payloads, budget)
    fitting = [count for count in counts if count <= budget]
    return payloads_for_threads(payloads, max(fitting)) if fitting else ()


def is_specialized(
    payload: Payload,
    others: Iterable[Payload],
) -> bool:
    """Whether another payload of the same thread count accepts the single sizes of this one too."""
    point = payload.first_point
    return is_exact(payload) and any(
        other.num_threads == payload.num_threads and not is_exact(other) and other.accepts(point)
        for other in others
    )


def without_specialized(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
    """Drop the payloads for which `is_specialized` holds."""
    return tuple(item for item in payloads if not is_specialized(item, payloads))


def is_exact(payload: Payload) -> bool:
    """Whether a payload accepts only one size of every dim."""
    return not any(dim.varies for dim in payload.dims)


def payload_at(
    payloads: Iterable[Payload],
    point: Point,
) -> Payload | None:
    """The most specific payload that accepts these sizes, which is the first; None if there is
    none.
    """
    return next((payload for payload in payloads if payload.accepts(point)), None)
