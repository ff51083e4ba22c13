"""The environment of a build: variables that would change it, and its toolchain. Imports torch only
to read torch's own versions.

- Refused (`check_environment`): read once, by oneDNN, MKL or torch. They change numbers and
  packing, also of the model, or how torch captures and compiles.
- Cleared (`cleared`): read by the compilers and by torch while they work.
- In the key: CXX, since the compiler's version is part of the toolchain.

Variables that only change a process's speed (OMP_WAIT_POLICY, LD_PRELOAD, ...) change no payload.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata

from freezer.codec import Json, frozen
from freezer.errors import UsageError
from freezer.freezing.recipes import ENGINE_PACKAGES, QUANTIZERS
from freezer.hardware import DeviceClass


@frozen
class Refused:
    """A variable that builds and judges refuse.

    Attributes:
        why: its effect.
        plain: values without effect, in lower case.
        kind: the kind of device class that it affects; None for all.
    """

    why: str
    plain: tuple[str, ...] = ()
    kind: str | None = None


_FPMATH = Refused(
    why="lets oneDNN compute float32 in fewer bits, also in the source model", plain=("strict",)
)
_HINTS = Refused(
    why="lets oneDNN pack weights for other vectors than the device class's", plain=("no_hints",)
)
_TF32 = ("", "0", "false", "no", "off", "n")

REFUSED_VARIABLES: Mapping[str, Refused] = {
    "ONEDNN_DEFAULT_FPMATH_MODE": _FPMATH,
    "DNNL_DEFAULT_FPMATH_MODE": _FPMATH,
    "ONEDNN_CPU_ISA_HINTS": _HINTS,
    "DNNL_CPU_ISA_HINTS": _HINTS,
    "MKL_CBWR": Refused(
        why="lets MKL compute and pack for other instructions than the device class's",
        plain=("auto", "off"),
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Refused(
        why="lets torch multiply float32 matrices in fewer bits", plain=_TF32
    ),
    "NVIDIA_TF32_OVERRIDE": Refused(
        why="lets every CUDA library multiply float32 in fewer bits",
        plain=("0",),
        kind="cuda",
    ),
    "TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE": Refused(
        why="changes the strides that torch.export gives", plain=("0",)
    ),
    "MKL_ENABLE_INSTRUCTIONS": Refused(
        why="lets MKL compute and pack for other instructions than the device class's", kind="cpu"
    ),
}
"""By name. Unset or empty variables, and those with a limit of the device class, have no effect."""

_OF_TORCH = re.compile(
    r"(TORCH_?INDUCTOR|AOT_?INDUCTOR|INDUCTOR|TORCH_?DYNAMO|TORCH_COMPILER?|TORCHEXPORT)_"
    r"(?!CACHE_DIR$|COMPILE_THREADS$)\w+"
)
"""Torch reads most of them when it is imported. The cache's folder and the number of processes that
compile change no payload."""

CLEARED = (
    # Directories to search besides the compiler's own, and programs to use instead of its own.
    *(
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "LD_RUN_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
    ),
    # Flags: of gcc's tests, of clang's driver, of the linker.
    *("GCC_COMPARE_DEBUG", "CCC_OVERRIDE_OPTIONS", "CCC_ADD_ARGS", "LDEMULATION", "GNUTARGET"),
    # Further output files.
    *("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "SOURCE_DATE_EPOCH"),
    # Of torch, read while it works. `CI` turns warnings into errors, which decides which operators
    # Inductor takes.
    *("CI", "DUMP_AOTI_MINIFIER", "FAKE_ALLOW_META", "TORCH_FAKE_TENSOR_DISPATCH_CACHE"),
)
"""Variables that builds ignore."""


def check_environment(device_class: DeviceClass, environ: Mapping[str, str] | None = None) -> None:
    """Refuse an environment that changes numbers or packing in a way that this process cannot undo.

    Args:
        device_class: device class to build or judge for.
        environ: this process's environment by default.

    Raises:
        UsageError: such a variable is set; code CP-ENVIRONMENT.
    """
    environ = os.environ if environ is None else environ
    for name, refused in REFUSED_VARIABLES.items():
        value = environ.get(name, "")
        plain = [*refused.plain, device_class.limits.get(name, "")]
        harmless = value.lower() in ("", *map(str.lower, plain))
        if not harmless and refused.kind in (None, device_class.kind):
            expected = " or ".join(filter(None, plain))
            raise _refusal(name, value, refused.why, f"unset, or {expected}")
    for name in filter(_OF_TORCH.fullmatch, environ):
        why = "changes how torch captures or compiles a model"
        raise _refusal(name, environ[name], why, "unset")


def _refusal(
    name: str,
    value: str,
    why: str,
    expected: str,
) -> UsageError:
    return UsageError(
        f"{name}={value} in the environment {why}; expected {expected}. Unset it before Python, or"
        " the worker, starts",
        code="CP-ENVIRONMENT",
    )


@contextmanager
def cleared() -> Iterator[None]:
    """Remove the variables that captures, Inductor and the compilers read while they work, and
    restore them afterwards.
    """
    taken = {name: os.environ.pop(name) for name in CLEARED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


def cpu_toolchain() -> Json:
    """Versions of everything that shapes a payload for a CPU: torch, oneDNN, the C++ compiler,
    CUDA, Python, and other engines.
    """
    return {
        **torch_versions(),
        "cxx": _version(compiler()),
        "python": platform.python_version(),
        **installed_versions(),
    }


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Versions of the installed packages that build payloads for other engines than torch."""
    found = {}
    engines = [name for packages in ENGINE_PACKAGES.values() for name in packages]
    for name in dict.fromkeys((*engines, *QUANTIZERS)):
        with suppress(metadata.PackageNotFoundError):
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
        [compiler, "--version"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return found.splitlines()[0] if found else None
