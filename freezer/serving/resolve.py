"""Resolve a reference to published artifacts, and describe the process that would serve them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from freezer.artifact.folder import MANIFEST, Artifact, folder_of
from freezer.artifact.manifest import Manifest
from freezer.artifact.signatures import Signatures
from freezer.errors import IntegrityError, UsageError
from freezer.hardware.cgroups import thread_budget
from freezer.hardware.cuda_requirements import CudaHere
from freezer.hardware.host import this_host
from freezer.hardware.machine import detect
from freezer.runtime.cuda import cuda_here
from freezer.runtime.threads import own_count
from freezer.serving.selection import Image, LoadOptions, ServingProcess
from freezer.store.store import Store, Version


def resolve_images(reference: str | Path, store: str | None, stack: ExitStack) -> tuple[Image, ...]:
    """List the published artifacts that a reference names; their manifests are not read yet.

    Args:
        reference, store: see `load`.
        stack: owns the temporary folders of fetched artifacts.

    Raises:
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
    """
    folder = folder_of(reference)
    if folder is not None:
        artifact = Artifact.read(folder)
        return (
            Image(
                device_class=artifact.manifest.device_class,
                manifest=lambda: artifact.manifest,
                signatures=partial(_folder_signatures, artifact),
                fetch=lambda _: artifact,
            ),
        )
    opened = Store.open(store or "store")
    version = opened.version(str(reference))
    return tuple(_store_image(opened, version, name, stack) for name in version.images)


def _store_image(store: Store, version: Version, name: str, stack: ExitStack) -> Image:
    def signatures() -> tuple[Signatures | None, bytes]:
        return store.signatures(version, name), store.manifest_bytes(version, name)

    def fetch(paths: Collection[str] | None) -> Artifact:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="coldpress-"))
        return store.materialize(version, name, Path(scratch), paths=paths)

    return Image(device_class=name, manifest=partial(store.manifest, version, name), signatures=signatures, fetch=fetch)


def _folder_signatures(artifact: Artifact) -> tuple[Signatures | None, bytes]:
    path = artifact.folder / MANIFEST
    data = path.read_bytes()
    if Manifest.from_bytes(data, origin=str(path)) != artifact.manifest:
        raise IntegrityError(f"{path} changed while it was read; pull the artifact again")
    return Signatures.read(artifact.folder), data


def process_here(images: Sequence[Image], options: LoadOptions) -> ServingProcess:
    """Describe this process; asks CUDA only where a published class needs a GPU of this machine."""
    needs_cuda = any(image.device_class.startswith("cuda-") and image.device_class in detect().classes for image in images)
    device = None if options.device is None else torch.device(options.device)
    return ServingProcess(
        host=this_host(),
        environ=os.environ,
        num_threads=num_threads_here(options.threads),
        torch_version=torch.__version__,
        cuda=cuda_here(device) if needs_cuda else CudaHere(),
    )


def num_threads_here(threads: int | None) -> int:
    """Threads that calls may use: `threads`, or torch's count limited by the CPUs of this process.

    Raises:
        UsageError: `threads` is less than 1.
    """
    if threads is None:
        return thread_budget(own_count())
    if threads < 1:
        raise UsageError(f"got threads={threads}, expected at least 1, or None for as many as this process may use")
    return threads
