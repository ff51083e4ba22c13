"""Load a frozen model: resolve -> select -> verify -> open -> canary.

Only JSON is read until an artifact is selected. Its digests are verified before it is opened, no
compiler is used, and the golden inputs run on the machine that will serve. If an artifact fails,
the next compatible one is opened, down to `portable`; `model.ladder` records the refusals. Payloads
are opened by torch (opening.py) or without it (native_load.py); this module does not import it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from freezer.artifact import (
    ENGINES,
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MANIFEST,
    Artifact,
    Claims,
    Manifest,
    Signatures,
    folder_of,
    read_artifacts,
    read_keys,
    set_within,
)
from freezer.errors import (
    CudaGraphsError,
    IntegrityError,
    Refusal,
    StoreUnreachableError,
    UsageError,
)
from freezer.files import scratch_folder
from freezer.hardware import CudaHere, detect, this_host, thread_budget
from freezer.hardware import device_class as class_named
from freezer.serving.compatibility import native_payloads, refuse_by_isa
from freezer.serving.selection import (
    Image,
    LoadOptions,
    Selection,
    ServingProcess,
    failure,
    select_image,
    slowdown,
)
from freezer.store import Store, Version

if TYPE_CHECKING:
    from freezer.runtime.frozen_model import FrozenModel
    from freezer.runtime.native import NativeModel

logger = logging.getLogger("coldpress")


class _Keywords(TypedDict, total=False):
    """The arguments of `load` that its overloads have in common."""

    store: str | None
    device_class: str
    threads: int | None
    strict: bool
    limit_isa: bool
    canary: bool
    device: str | None
    cuda_graphs: bool
    trusted_keys: Sequence[str | Path]
    min_version: int


@overload
def load(
    reference: str | Path, *, runtime: Literal["torch"] = ..., **options: Unpack[_Keywords]
) -> FrozenModel: ...


@overload
def load(
    reference: str | Path, *, runtime: Literal["native"], **options: Unpack[_Keywords]
) -> NativeModel: ...


def load(
    reference: str | Path,
    *,
    store: str | None = None,
    device_class: str = "auto",
    threads: int | None = None,
    strict: bool = False,
    limit_isa: bool = False,
    canary: bool = True,
    device: str | None = None,
    cuda_graphs: bool = False,
    trusted_keys: Sequence[str | Path] = (),
    min_version: int = 0,
    runtime: Literal["torch", "native"] = "torch",
) -> FrozenModel | NativeModel:
    """Load the frozen model for this machine.

    Args:
        reference: `MODEL` or `MODEL:VERSION` in a store, or an artifact folder.
        store: URI of the store; `./store` by default. Ignored for a folder.
        device_class: load only this class; `auto` loads the most specific class that serves.
        threads: threads that calls may use; by default torch's count in this process, limited by
            its CPU affinity and the quotas of its control groups. Payloads for exactly this count
            are opened, else those for the largest count below it.
        strict: raise if the first artifact does not serve, instead of trying the next, or if only
            an older version has a better class for this machine. The error also has the refusals of
            the others by their manifests.
        limit_isa: allow oneDNN to be limited to the instruction set of a lesser class, for the
            whole process. Only works before torch's first oneDNN operation in the process.
        canary: run the smallest golden inputs of each payload and compare; set False only if
            another check replaces it. `verify` runs all.
        device: device to run on: `cpu`, `cuda:1`. Artifacts for other devices are refused. Default:
            the device that the artifact is made for; for a CUDA class the current GPU if it is of
            the class, else the first that is.
        cuda_graphs: on a GPU, capture each call of a payload for one size, and replay it from then
            on; calls of one size run one after the other. Not for models that change state or draw
            random numbers.
        trusted_keys: PEM files of public keys, one of which must have signed the artifact
            (`coldpress sign`). Empty: no signature is required. A signature names model, version
            and class, and is valid for these only.
        min_version: refuse an older version, which a store may offer as its latest. Ignored for a
            folder. To refuse `portable` if a better artifact is missing, name `device_class`.
        runtime: `native` opens Inductor payloads for CPUs without importing torch, for a faster
            start; arrays are numpy's then. Other artifacts are refused.

    Raises:
        CudaGraphsError: calls of the selected artifact cannot be captured.
        UsageError: this process has no such device, or `runtime` does not run on it.
        MissingDependencyError: the native runtime does not find torch's shared libraries.
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
        IncompatibleError: no artifact serves; its `ladder` has every refusal.
    """
    if runtime not in ("torch", "native"):
        raise UsageError(f"got runtime={runtime!r}, expected 'torch' or 'native'")
    if runtime == "native" and (cuda_graphs or device not in (None, "cpu")):
        raise UsageError(
            "runtime='native' runs on the CPU, without CUDA graphs; omit `device` and"
            " `cuda_graphs`, or use runtime='torch'"
        )
    if runtime == "native":
        # has extension modules, which cannot be imported while a library loads
        import freezer.runtime.tensor_files
        from freezer.runtime.native import preload

        preload()
        import freezer.serving.native_load  # noqa: F401
    options = LoadOptions(
        device_class=device_class,
        threads=threads,
        strict=strict,
        limit_isa=limit_isa,
        canary=canary,
        device=_with_index(device),
        cuda_graphs=cuda_graphs,
        trusted_keys=read_keys(trusted_keys),
        min_version=min_version,
        runtime=runtime,
    )
    with ExitStack() as stack:
        published = resolve_reference(reference, store)
        images = images_of(reference, published, stack)
        older = _only_older(*published) if strict and published is not None else {}
        selection = select_image(images, process_here(images, options), options, older)
        model = None
        while selection.chosen is not None and model is None:
            try:
                model = open_selection(selection)
            except (StoreUnreachableError, CudaGraphsError):
                raise
            except Exception as error:  # a payload may raise anything; the next artifact is tried
                selection = selection.after(failure(selection.chosen.device_class, error))
        if model is None:
            raise selection.error(reference)
        for refusal in selection.refused:
            logger.warning("%s: %s", reference, _in_words(refusal, images, selection))
    return model


def _with_index(device: str | None) -> str | None:
    if device in (None, "cpu"):
        return device
    from freezer.runtime.devices import with_index

    return str(with_index(device or "cpu"))


def _in_words(refusal: Refusal, images: Sequence[Image], selection: Selection) -> str:
    """A refusal in words: what serves instead, how much slower it is expected to be, and why."""
    assert selection.chosen is not None
    slower = ""
    with suppress(Exception):  # the refused manifest may be what cannot be read
        refused = next(image for image in images if image.device_class == refusal.rung).manifest()
        slower = (
            f"; {slowdown(refused, selection.chosen.manifest(), selection.process.num_threads)}"
        )
    serves = selection.chosen.device_class
    if serves == refusal.rung:
        serves = f"{serves} ({selection.chosen.manifest().recipe.name}, which needs torch alone)"
    return f"{serves} serves instead of {refusal.rung}{slower}; refused: {refusal}"


def open_selection(selection: Selection) -> FrozenModel | NativeModel:
    """Fetch the files of the chosen artifact that a call needs, and open it.

    Raises:
        IntegrityError, CanaryError, CudaGraphsError: see `open_artifact`.
    """
    image, options, process = selection.chosen, selection.options, selection.process
    assert image is not None
    manifest = image.manifest()
    if options.limit_isa and refuse_by_isa(manifest, process.machine()) is not None:
        os.environ.update(class_named(manifest.device_class).limits)
    golden = (GOLDEN_INPUTS, GOLDEN_OUTPUTS) if options.canary else ()
    native = options.runtime == "native"
    payloads = set_within(
        native_payloads(manifest) if native else manifest.payloads, process.num_threads
    )
    artifact = image.fetch([*(item.path for item in payloads), *golden])
    if native:
        from freezer.serving.native_load import open_native

        return open_native(artifact, process.num_threads, options, ladder=selection.ladder)
    from freezer.serving.opening import open_artifact

    return open_artifact(artifact, process.num_threads, options, ladder=selection.ladder)


def resolve_reference(reference: str | Path, store: str | None) -> tuple[Store, Version] | None:
    """The store and the version that a reference names; None for a folder.

    Args:
        reference, store: see `load`.

    Raises:
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
    """
    if folder_of(reference) is not None:
        return None
    opened = Store.open(store or "store")
    return opened, opened.version(str(reference))


def images_of(
    reference: str | Path, published: tuple[Store, Version] | None, stack: ExitStack
) -> tuple[Image, ...]:
    """List the artifacts that a reference names; manifests in a store are not read yet.

    Args:
        reference: see `load`.
        published: result of `resolve_reference`.
        stack: owns the temporary folders of fetched artifacts.
    """
    if published is None:
        return tuple(_folder_image(artifact) for artifact in read_artifacts(Path(reference)))
    store, version = published
    return tuple(
        _store_image(store, version, name, rank, stack)
        for name in version.images
        for rank in range(len(version.images_of(name)))
    )


def _folder_image(artifact: Artifact) -> Image:
    return Image(
        device_class=artifact.manifest.device_class,
        manifest=lambda: artifact.manifest,
        manifest_bytes=partial(_manifest_bytes, artifact),
        signatures=partial(Signatures.read, artifact.folder),
        fetch=lambda _: artifact,
    )


def _only_older(store: Store, version: Version) -> dict[str, int]:
    """Device classes that only older versions than this one have, with the number of the newest of
    these.
    """
    found: dict[str, int] = {}
    for number in reversed(store.versions(version.model)):
        if number < version.number:
            with suppress(IntegrityError):  # a damaged version serves nobody
                for name in store.version(f"{version.model}:{number}").images:
                    found.setdefault(name, number)
    return {name: number for name, number in found.items() if name not in version.images}


def _store_image(store: Store, version: Version, name: str, rank: int, stack: ExitStack) -> Image:
    def fetch(paths: Collection[str] | None) -> Artifact:
        scratch = stack.enter_context(scratch_folder())
        return store.materialize(version, name, Path(scratch), rank=rank, paths=paths)

    return Image(
        device_class=name,
        manifest=partial(store.manifest, version, name, rank=rank),
        manifest_bytes=partial(store.manifest_bytes, version, name, rank=rank),
        signatures=partial(store.signatures, version, name, rank=rank),
        fetch=fetch,
        asked=Claims(model=version.model, version=version.number, device_class=name),
    )


def _manifest_bytes(artifact: Artifact) -> bytes:
    """The bytes of manifest.json, if they still are those of the artifact."""
    path = artifact.folder / MANIFEST
    data = path.read_bytes()
    if Manifest.from_bytes(data, origin=str(path)) != artifact.manifest:
        raise IntegrityError(f"{path} changed while it was read; pull the artifact again")
    return data


def process_here(images: Sequence[Image], options: LoadOptions) -> ServingProcess:
    """Describe this process; asks CUDA only where a published class needs a GPU of this machine.

    Raises:
        UsageError: `options.threads` is less than 1.
    """
    if options.threads is not None and options.threads < 1:
        expected = "at least 1, or None for as many as this process may use"
        raise UsageError(f"got threads={options.threads}, expected {expected}")
    host = this_host()
    if options.runtime == "native":
        from freezer.runtime.native import libtorch, torch_version

        num_threads, version, cuda = (
            options.threads or libtorch().num_threads,
            torch_version(),
            CudaHere(),
        )
    else:
        num_threads, version, cuda = _torch_process(images, options)
    return ServingProcess(
        host=host,
        environ=os.environ,
        num_threads=options.threads or thread_budget(num_threads),
        torch_version=version,
        cuda=cuda,
        engines={} if options.runtime == "native" else _engines(),
    )


def _engines() -> dict[str, str]:
    """The versions of the installed engines."""
    return {name: _version_of(name) for name in ENGINES.values() if find_spec(name) is not None}


def _version_of(package: str) -> str:
    """The version of an installed package; other distributions, such as onnxruntime-gpu, may
    contain it.
    """
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(import_module(package).__version__)


def _torch_process(images: Sequence[Image], options: LoadOptions) -> tuple[int, str, CudaHere]:
    """Default thread count, version of torch, and the GPUs that may serve."""
    import torch

    from freezer.runtime.devices import cuda_here
    from freezer.runtime.torch_settings import own_count

    needs_cuda = any(
        image.device_class.startswith("cuda-") and image.device_class in detect().classes
        for image in images
    )
    device = None if options.device is None else torch.device(options.device)
    return own_count(), torch.__version__, cuda_here(device) if needs_cuda else CudaHere()
