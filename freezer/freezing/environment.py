"""The environment of a build: variables, and settings of torch, that would change it. Imports no
torch.

- Refused (`check_environment`): read once by oneDNN, MKL or torch's C++ code. They change numbers
  and packing, also of the model.
- Cleared (`cleared`): read by Inductor, torch.export and the compilers while they work.
- Reset (`without_environment`): read by torch's Python code when it was imported, possibly long
  before a build; some override values that a program sets. The values without any variables come
  from executing torch's configuration modules again in an environment without them.
- In the key: CXX, since the compiler's version is part of the toolchain.

Variables that only change a process's speed (OMP_WAIT_POLICY, LD_PRELOAD, ...) change no payload.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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

_OF_TORCH = (
    r"(?:TORCH_?INDUCTOR|AOT_?INDUCTOR|INDUCTOR|TORCH_?DYNAMO|TORCH_COMPILER?|TORCHEXPORT)_\w+"
)
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


MODULES = (
    "torch._inductor.config",
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch.compiler.config",
)
"""The modules that configure how torch captures, freezes and compiles."""


@functools.cache
def fresh_module(name: str) -> ModuleType:
    """A second copy of a configuration module, executed without the variables that builds must not
    depend on.
    """
    first = sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"{name}_of_coldpress", str(first.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a configuration module looks itself up there
    try:
        with cleared():
            spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def straying(name: str) -> dict[str, Any]:
    """The settings that the environment or a program has changed, with torch's defaults as
    values.
    """
    plain, now = fresh_module(name).get_config_copy(), sys.modules[name].get_config_copy()
    return {
        setting: plain[setting]
        for setting, value in now.items()
        if setting in plain and value != plain[setting]
    }


@contextlib.contextmanager
def without_environment() -> Iterator[None]:
    """Make torch behave as if none of its variables were set. Values that a program has set stay.

    Modules not yet imported read the cleared environment.
    """
    with contextlib.ExitStack() as stack:
        for name in MODULES:
            if name in sys.modules:
                _reset(sys.modules[name], fresh_module(name), stack)
        stack.enter_context(cleared())
        yield


def _reset(module: Any, plain: Any, stack: contextlib.ExitStack) -> None:
    """Give settings from the environment their plain values, until the stack is closed."""
    changed: dict[str, Any] = {}
    now, values = module.get_config_copy(), plain.get_config_copy()
    for name, entry in module._config.items():
        other = plain._config.get(name)
        if other is None or name not in values or _origin(entry) == _origin(other):
            continue
        if entry.env_value_force is not other.env_value_force:
            stack.callback(setattr, entry, "env_value_force", entry.env_value_force)
            entry.env_value_force = other.env_value_force
            changed[name] = values[name]
        elif now[name] in (
            entry.default,
            entry.env_value_default,
        ):  # otherwise a program has set it
            changed[name] = values[name]
    if changed:
        stack.enter_context(module.patch(changed))


def _origin(entry: Any) -> tuple[Any, Any, Any]:
    """The origin of a setting's value, unless a program sets it."""
    return entry.default, entry.env_value_force, entry.env_value_default
