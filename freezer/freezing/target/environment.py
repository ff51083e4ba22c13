"""Environment variables that would change a build. Imports no torch.

    refused  read once by oneDNN, MKL or torch's C++ code; they change numbers and packing, also of the model  check_environment
    cleared     read by Inductor, torch.export and the compilers while they work             cleared
    reset       read by torch's Python code when it was imported                     torch_config.py
    in the key  CXX: the compiler's version is part of the toolchain                    toolchain.py
    explicit    the thread count, and the limits of the device class                       target.py

Variables that only change a process's speed (OMP_WAIT_POLICY, LD_PRELOAD, ...) change no payload; a
judge records them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from freezer.errors import UsageError
from freezer.hardware import DeviceClass


@dataclass(frozen=True, kw_only=True, slots=True)
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
        why="lets every CUDA library multiply float32 in fewer bits", plain=("0",), kind="cuda"
    ),
    "TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE": Refused(
        why="changes the strides that torch.export gives", plain=("0",)
    ),
}
"""By name. Unset or empty variables have no effect."""

_MKL_LIMIT = "MKL_ENABLE_INSTRUCTIONS"

_OF_TORCH = r"(?:TORCHINDUCTOR|TORCH_INDUCTOR|AOT_?INDUCTOR|INDUCTOR|TORCHDYNAMO|TORCH_DYNAMO|TORCH_COMPILER?|TORCHEXPORT)_\w+"
_OF_COMPILERS = (
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
)
_ALONE = (
    *_OF_COMPILERS,
    "CI",
    "DUMP_AOTI_MINIFIER",
    "FAKE_ALLOW_META",
    "TORCH_FAKE_TENSOR_DISPATCH_CACHE",
)
"""`CI` turns warnings of torch into errors, which decides which operators Inductor takes."""

CLEARED = re.compile(rf"{_OF_TORCH}|{'|'.join(_ALONE)}")
_KEPT = ("TORCHINDUCTOR_CACHE_DIR",)
"""The location of the cache changes no payload."""


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
        if (
            value
            and value.lower() not in refused.plain
            and refused.kind in (None, device_class.kind)
        ):
            expected = f"unset, or {' or '.join(text for text in refused.plain if text)}"
            raise _refusal(name, value, refused.why, expected)
    limit, own = environ.get(_MKL_LIMIT, ""), device_class.limits.get(_MKL_LIMIT, "")
    if limit and limit.upper() != own.upper() and device_class.kind == "cpu":
        why = f"lets MKL compute and pack for other instructions than those of {device_class.name}"
        raise _refusal(_MKL_LIMIT, limit, why, f"unset, or {own}" if own else "unset")


def _refusal(name: str, value: str, why: str, expected: str) -> UsageError:
    return UsageError(
        f"{name}={value} in the environment {why}; expected {expected}. Unset it before Python, or"
        " the worker, starts",
        code="CP-ENVIRONMENT",
    )


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Remove the variables that captures, Inductor and the compilers read while they work, and
    restore them afterwards.
    """
    taken = {
        name: value
        for name, value in os.environ.items()
        if CLEARED.fullmatch(name) and name not in _KEPT
    }
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)
