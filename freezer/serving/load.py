"""Load a frozen model. Read first: the steps of `load` are

1. resolve: a reference names artifacts, in a folder or in a version of a store (images.py).
2. select: the best artifact that serves this process, by JSON alone (selection.py).
3. verify: the digests of the files that a call needs, before anything is opened.
4. open: its payloads, with torch (opening.py) or without (native_load.py); no compiler is used.
5. canary: the golden inputs run on the machine that will serve, and are compared.

If an artifact fails steps 3 to 5, the next compatible one is opened, down to `portable`;
`model.ladder` records the refusals. This module does not import torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from freezer.artifact import (
    ENGINES,
    Manifest,
    Payload,
    read_keys,
    slower_than_eager,
)
from freezer.errors import StoreUnreachableError
from freezer.hardware import PORTABLE, CudaHere, detect, this_host, thread_budget
from freezer.serving.compatibility import limits_for, needed_files
from freezer.serving.images import images_of, resolve_reference
from freezer.serving.process import LoadOptions, ServingProcess
from freezer.serving.selection import Selection, failure, in_words, select_image

if TYPE_CHECKING:
    from freezer.runtime.frozen_model import FrozenModel
    from freezer.runtime.native import NativeModel
    from freezer.serving.following import WatchedModel

logger = logging.getLogger("coldpress")


class LoadKeywords(TypedDict, total=False):
    """The fields of LoadOptions that do not decide the type of the model."""

    store: str | None
    device_class: str
    threads: int | None
    strict: bool
    limit_isa: bool
    canary: bool
    device: str | None
    trusted_keys: Sequence[str | Path]
    min_version: int
    key: str | None


@overload
def load(
    reference: str | Path, *, runtime: Literal["torch"] = ..., **keywords: Unpack[LoadKeywords]
) -> FrozenModel: ...


@overload
def load(
    reference: str | Path, *, runtime: Literal["native"], **keywords: Unpack[LoadKeywords]
) -> NativeModel: ...


@overload
def load(
    reference: str | Path,
    options: LoadOptions,
) -> FrozenModel | NativeModel: ...


def load(
    reference: str | Path, options: LoadOptions | None = None, **keywords: object
) -> FrozenModel | NativeModel:
    """Load the frozen model for this machine.

    Args:
        reference: `MODEL`, `MODEL:VERSION` or `MODEL:NAME` in a store, or an artifact folder.
        options: how to load it.
        keywords: fields of LoadOptions by name, in place of `options`.

    Raises:
        UsageError: this process has no such device, or the options do not fit together.
        MissingDependencyError: the native runtime does not find torch's shared libraries.
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
        IncompatibleError: no artifact serves; its `ladder` has every refusal.
    """
    options = replace(options or LoadOptions(), **keywords)  # type: ignore[arg-type]
    with ExitStack() as stack:
        published = resolve_reference(reference, options.store, options.key)
        images = images_of(reference, published, stack)
        process = process_here(options, [image.device_class for image in images])
        selection = select_image(images, process)
        while selection.chosen is not None:
            try:
                model = _open(selection)
            except StoreUnreachableError:
                raise
            except Exception as error:  # a payload may raise anything; the next artifact is tried
                selection = selection.after(failure(selection.chosen.device_class, error))
            else:
                for refusal in selection.refused:
                    logger.warning("%s: %s", reference, in_words(refusal, images, selection))
                if published is not None:
                    watch = partial(_follow, str(reference), options, published[1])
                    object.__setattr__(model, "_follow", watch)
                return model
        raise selection.error(reference)


def _follow(*given: Any) -> WatchedModel:
    """See `follow`, which imports this module."""
    from freezer.serving.following import follow

    return follow(*given)


def _open(selection: Selection) -> FrozenModel | NativeModel:
    """Fetch the files of the chosen artifact that a call needs, verify and open them, and run the
    canary.

    Raises:
        IntegrityError, CanaryError: see `open_artifact`.
    """
    image = selection.chosen
    assert image is not None
    process = selection.process
    options = process.options
    manifest = image.manifest()
    if options.limit_isa:
        os.environ.update(limits_for(manifest, process))
    payloads, paths = needed_files(manifest, process.num_threads, options)
    artifact = image.fetch(paths)
    model: FrozenModel | NativeModel
    if options.runtime == "native":
        from freezer.serving.native_load import open_native

        model = open_native(
            artifact,
            process.num_threads,
            options,
            ladder=selection.ladder,
        )
    else:
        from freezer.serving.opening import open_artifact

        model = open_artifact(
            artifact,
            process.num_threads,
            options,
            ladder=selection.ladder,
        )
    _warn_of_slow_sizes(manifest, payloads)
    return model


def _warn_of_slow_sizes(manifest: Manifest, payloads: Sequence[Payload]) -> None:
    """Warn of sizes that are slower than eager."""
    paths = {payload.path for payload in payloads}
    points = manifest.latency.points if manifest.latency else ()
    slower = slower_than_eager(point for point in points if point.payload in paths)
    if slower and manifest.device_class != PORTABLE:
        logger.warning(
            "%s for %s was measured slower than eager with %s",
            *(manifest.model, manifest.device_class, slower),
        )


def process_here(options: LoadOptions, classes: Iterable[str]) -> ServingProcess:
    """Describe this process.

    Args:
        options: options of the load.
        classes: published device classes; CUDA is asked only where this machine has one of a GPU.

    Raises:
        UsageError: this process has no such device.
        MissingDependencyError: the native runtime does not find torch's shared libraries.
    """
    cuda, engines = CudaHere(), dict[str, str]()
    if options.runtime == "native":
        from freezer.runtime.native import libtorch
        from freezer.runtime.native import torch_version as native_version

        num_threads, torch_version = libtorch().num_threads, native_version()
    else:
        import torch

        from freezer.runtime.devices import cuda_here, with_index
        from freezer.runtime.torch_settings import own_count

        num_threads, torch_version = own_count(), torch.__version__
        engines = {name: _version_of(name) for name in ENGINES.values() if find_spec(name)}
        device = None if options.device is None else with_index(options.device)
        options = replace(options, device=None if device is None else str(device))
        if any(name.startswith("cuda-") for name in {*classes} & {*detect().classes}):
            cuda = cuda_here(device)
    return ServingProcess(
        host=this_host(),
        environ=os.environ,
        num_threads=options.threads or thread_budget(num_threads),
        torch_version=torch_version,
        options=options,
        cuda=cuda,
        engines=engines,
        trusted_keys=read_keys(options.trusted_keys),
    )


def _version_of(package: str) -> str:
    """The version of an installed package; other distributions, such as onnxruntime-gpu, may
    contain it.
    """
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(import_module(package).__version__)
