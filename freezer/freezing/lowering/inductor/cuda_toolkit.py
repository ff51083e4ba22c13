"""CUDA headers and libraries for compiling the host code of a package where no toolkit is
installed.

Inductor looks for a toolkit in CUDA_HOME or /usr/local/cuda. A torch from PyPI brings the files in
packages of its own (`nvidia/cu13`, or `nvidia/cuda_runtime` and others of CUDA 12), without the
names that a linker looks for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from freezer.errors import BuildError


@contextlib.contextmanager
def cuda_toolkit(folder: Path) -> Iterator[None]:
    """Let torch find CUDA's headers and libraries during a build: an installed toolkit's, or else
    those of torch's packages and the driver that this process uses.

    Args:
        folder: where to make a temporary folder of links.

    Raises:
        BuildError: there are no headers; code CP-CUDA-HEADERS.
    """
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix=".cuda-", dir=folder) as home:
        _link_toolkit(Path(home))
        with mock.patch.object(cpp_extension, "CUDA_HOME", home):
            yield


def _link_toolkit(home: Path) -> None:
    """Link headers and libraries as in a toolkit: `include`, and `lib64` with the names that a
    linker looks for.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (nvidia and nvidia.submodule_search_locations) or ()]
    headers = [header for root in roots for header in root.glob("*/include/*")]
    libraries = [library for root in roots for library in root.glob("*/lib/lib*.so*")]
    maps = Path("/proc/self/maps").read_text().split()
    driver = {Path(word) for word in maps if Path(word).name.startswith("libcuda.so")}
    links = {home / "include" / header.name: header for header in headers}
    for library in (*libraries, *driver):
        name, _, _ = library.name.partition(".so")
        links[home / "lib64" / f"{name}.so"] = library
    if home / "include" / "cuda_runtime_api.h" not in links:
        raise BuildError(
            "inductor: no cuda_runtime_api.h to compile the host code with; install CUDA's toolkit"
            " and set CUDA_HOME, or pip install nvidia-cuda-runtime for the CUDA of this torch",
            code="CP-CUDA-HEADERS",
        )
    for link, file in links.items():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(file)
