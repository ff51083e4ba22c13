"""The toolchain: versions of everything that shapes a payload.

Imports torch only to read torch's own versions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from freezer.freezing.recipes import ENGINE_PACKAGES


def toolchain_with(torch_versions: Mapping[str, str | None]) -> dict[str, Any]:
    """Versions of everything that shapes a payload for a CPU: torch, oneDNN, the C++ compiler,
    CUDA, Python.

    Args:
        torch_versions: the result of `torch_versions()`.
    """
    return {
        "torch": torch_versions["torch"],
        "onednn": torch_versions["onednn"],
        "cxx": _version(compiler()),
        "cuda": torch_versions["cuda"],
        "python": platform.python_version(),
        **installed_versions(),
    }


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Versions of the installed packages that build payloads for other engines than torch."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for packages in ENGINE_PACKAGES.values() for name in packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def torch_versions() -> dict[str, str | None]:
    """Versions of the installed torch, and of the oneDNN and CUDA that it was built with."""
    import torch

    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return {
        "torch": str(torch.__version__),
        "onednn": onednn.group(1) if onednn else None,
        "cuda": torch.version.cuda,
    }


def compiler() -> str:
    """The C++ compiler that builds use: CXX, or g++."""
    return os.environ.get("CXX") or "g++"


@functools.cache
def _version(compiler: str) -> str | None:
    if shutil.which(compiler) is None:
        return None
    found = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return found.splitlines()[0] if found else None
