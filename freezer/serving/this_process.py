"""Describe this process for the selection of an artifact. Imports torch only where torch calls the
payloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from freezer.artifact import ENGINES, read_keys
from freezer.hardware import CudaHere, detect, this_host, thread_budget
from freezer.serving.process import LoadOptions, ServingProcess


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


def start_native() -> None:
    """Start to load torch's library for the native runtime, and import meanwhile."""
    # Has extension modules, which cannot be imported while a library loads.
    import freezer.runtime.tensor_files
    from freezer.runtime.native import preload

    preload()
    import freezer.serving.native_load  # noqa: F401


def _version_of(package: str) -> str:
    """The version of an installed package; other distributions, such as onnxruntime-gpu, may
    contain it.
    """
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(import_module(package).__version__)
