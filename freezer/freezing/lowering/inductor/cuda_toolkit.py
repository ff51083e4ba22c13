"""CUDA headers and libraries for compiling the host code of a package where no toolkit is
installed.

Inductor looks for a toolkit in CUDA_HOME or /usr/local/cuda. A torch from PyPI brings the files in
packages of its own (`nvidia/cu13`, or `nvidia/cuda_runtime` and others of CUDA 12), without the
names that a linker looks for.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from freezer.errors import BuildError

_HEADER = "cuda_runtime_api.h"
_DRIVER = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)


@contextlib.contextmanager
def cuda_toolkit(folder: Path) -> Iterator[None]:
    """Let torch find CUDA's headers and libraries during a build: an installed toolkit's, or else
    those of torch's packages.

    Args:
        folder: where to make a temporary folder of links.

    Raises:
        BuildError: there are no headers; code CP-CUDA-HEADERS.
    """
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    packages = nvidia_folders(sys.path)
    home = Path(tempfile.mkdtemp(prefix=".cuda-", dir=folder))
    try:
        link_toolkit(
            home,
            packages,
            driver_library(),
        )
        cpp_extension.CUDA_HOME = str(home)
        yield
    finally:
        cpp_extension.CUDA_HOME = None
        shutil.rmtree(home, ignore_errors=True)


def nvidia_folders(search_path: Sequence[str]) -> list[Path]:
    """The folders of NVIDIA's packages, in the order of the search path."""
    roots = [Path(entry) / "nvidia" for entry in search_path if entry]
    return [
        part for root in roots if root.is_dir() for part in sorted(root.iterdir()) if part.is_dir()
    ]


def link_toolkit(home: Path, packages: Sequence[Path], driver: Path | None) -> None:
    """Link headers and libraries as in a toolkit: `include`, and `lib64` with the names that a
    linker looks for.

    Raises:
        BuildError: no package has the headers.
    """
    include, lib = home / "include", home / "lib64"
    include.mkdir()
    lib.mkdir()
    for package in packages:
        for item in sorted((package / "include").glob("*")):
            if not (include / item.name).exists():
                (include / item.name).symlink_to(item)
        for item in sorted((package / "lib").glob("lib*.so*")):
            for name in (item.name, re.sub(r"\.so.*", ".so", item.name)):
                if not (lib / name).exists():
                    (lib / name).symlink_to(item)
    if not (include / _HEADER).exists():
        raise BuildError(
            f"inductor: no {_HEADER} to compile the host code with; install CUDA's toolkit and set"
            " CUDA_HOME, or pip install nvidia-cuda-runtime for the CUDA of this torch",
            code="CP-CUDA-HEADERS",
        )
    if driver is not None and not (lib / "libcuda.so").exists():
        (lib / "libcuda.so").symlink_to(driver)


def driver_library(folders: Sequence[str] = _DRIVER) -> Path | None:
    """The driver's libcuda.so.1, if it is found."""
    places = [*folders, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    libraries = [Path(place) / "libcuda.so.1" for place in places if place]
    return next((library for library in libraries if library.exists()), None)
