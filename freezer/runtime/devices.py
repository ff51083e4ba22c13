"""Devices of this process, numbered as by torch: choose a GPU of a device class, describe it, and
move tensors to it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import operator
import os
import platform
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freezer.errors import UsageError
from freezer.hardware import CudaHere, DeviceClass, Machine, detect, this_host
from freezer.runtime.tensors import flatten
from freezer.spec import unflatten

CPU = torch.device("cpu")

DEPTH = 3
"""Nesting of lists, tuples and dicts within which tensors in attributes are found."""


def tensors_on(
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Move tensors to a device, with their strides."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def called_on(
    function: Callable[..., Any],
    device: torch.device,
) -> Callable[..., Any]:
    """Wrap a function on a device, so that it takes and returns tensors on the CPU."""
    if device.type == "cpu":
        return function

    def call(
        *args: object,
        **kwargs: object,
    ) -> Any:
        moved_args = moved_to_device([*args], device, DEPTH)
        moved_kwargs = moved_to_device(kwargs, device, DEPTH)
        structure, leaves = flatten(function(*moved_args, **moved_kwargs))
        return unflatten(structure, [leaf.cpu() for leaf in leaves])

    return call


def moved_to_device(
    value: Any,
    device: torch.device,
    depth: int,
) -> Any:
    """The value with its tensors on a device; the value itself if all of them are there already."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    kind = type(value)
    if not depth or kind not in (list, tuple, dict):
        return value
    keys = list(value) if kind is dict else range(len(value))
    parts = [value[key] for key in keys]
    moved = [moved_to_device(part, device, depth - 1) for part in parts]
    if all(map(operator.is_, moved, parts)):
        return value
    if kind is dict:
        return dict(zip(keys, moved, strict=True))
    return kind(moved)


def no_cuda() -> str | None:
    """Why this process has no CUDA; None where it has.

    Starts the driver through torch: afterwards, a forked child must not use a GPU.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build of torch for CUDA"
    if torch.cuda.is_available():
        return None
    host = this_host()
    driver = f"driver {host.driver}" if host.driver else host.no_gpu
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU ({driver})"


def visible() -> list[tuple[torch.device, int]]:
    """GPUs that torch sees, with their compute capabilities, major * 10 + minor."""
    if no_cuda() is not None:
        return []
    gpus: list[tuple[torch.device, int]] = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        gpus.append((torch.device("cuda", index), major * 10 + minor))
    return gpus


def device_of(
    wanted: DeviceClass,
    machine: Machine,
    asked: str | torch.device | None = None,
) -> torch.device:
    """Choose a GPU of a CUDA class.

    Args:
        wanted: the class.
        machine: of this process; its CPU must run the class's host code.
        asked: the GPU to use, for example `cuda:1`; by default the current one if it is of the
            class, else the first that is.

    Raises:
        UsageError: there is none, `asked` is of another class, or the CPU does not run the host
            code; code CP-DEVICE-CLASS.
    """
    device = None if asked is None else with_index(asked)
    gpus = visible()
    fitting = [gpu for gpu, capability in gpus if capability == wanted.capability]
    seen = ", ".join(f"{gpu} is cuda-sm{capability}" for gpu, capability in gpus)
    problem = no_cuda()
    if problem is None and wanted.host not in machine.classes:
        why_not = machine.why_not.get(str(wanted.host), "the CPU is of another kind")
        problem = f"its host code is made for {wanted.host}, which cannot run here: {why_not}"
    elif problem is None and not fitting:
        problem = f"no GPU that this process sees has this compute capability: {seen}"
    elif problem is None and device not in (None, *fitting):
        problem = f"got {device}, but here {seen}; name a device of the class"
    if problem is not None:
        raise _no_device(f"this process cannot build for {wanted.name}: {problem}")
    if device is not None:
        return device
    default = torch.device("cuda", torch.cuda.current_device())
    return default if default in fitting else fitting[0]


def class_of(device: torch.device) -> str:
    """Name of a GPU's device class.

    Raises:
        UsageError: it is a CPU, or this process does not see the GPU; code CP-DEVICE-CLASS.
    """
    capability = dict(visible()).get(with_index(device))
    if capability is None:
        problem = no_cuda() or "this process sees no such GPU"
        raise _no_device(f"got device {device}, and {problem}")
    return f"cuda-sm{capability}"


def with_index(device: str | torch.device) -> torch.device:
    """Add the current GPU's index to `cuda`.

    Raises:
        UsageError: payloads do not run on such a device.
    """
    if not re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", str(device)):
        raise _no_device(f"got device {str(device)!r}, expected cpu, cuda or cuda:N")
    named = torch.device(device)
    if named.type == "cpu":
        return CPU
    if str(named) != "cuda":
        return named
    problem = no_cuda()
    if problem is not None:
        raise _no_device(f"got device {str(device)!r}: {problem}")
    return torch.device("cuda", torch.cuda.current_device())


def _no_device(problem: str) -> UsageError:
    return UsageError(problem, code="CP-DEVICE-CLASS")


def cuda_here(device: torch.device | None) -> CudaHere:
    """GPUs, CUDA and driver of this process.

    Args:
        device: include only this GPU; None for all.
    """
    gpus = [(str(gpu), capability) for gpu, capability in visible() if device in (None, gpu)]
    return CudaHere(
        devices=tuple(gpus),
        runtime=torch.version.cuda,
        driver=this_host().driver,
        why_not=no_cuda() or "",
    )


class _Begun(threading.local):
    """Whether this thread has a CUDA context."""

    yet = False


_begun = _Begun()


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one of this thread for a block: kernels run on the current GPU's
    stream.

    A thread gets a CUDA context by its first call of the runtime. Inductor launches its kernels
    through the driver, which fails in a thread without one.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    if not _begun.yet:
        torch.cuda.mem_get_info(device)
        _begun.yet = True
    return torch.cuda.device(device)


def gpu_versions(device: torch.device) -> dict[str, str | None]:
    """Versions besides torch's that influence a payload for a GPU: driver, GPU, cuDNN and Triton;
    empty for a CPU.
    """
    if device.type != "cuda":
        return {}
    versions = {
        "driver": this_host().driver,
        "gpu": torch.cuda.get_device_name(device),
        "cudnn": str(torch.backends.cudnn.version()),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    return versions


_OF_SPEED = re.compile(
    r"(?:OMP|KMP|GOMP|MKL|ONEDNN|DNNL|ATEN|MALLOC|TORCH_MKLDNN)_\w+|LD_PRELOAD|GLIBC_TUNABLES|"
    r"THP_MEM_ALLOC_ENABLE|TORCH_LINEAR_FLATTEN_3D|PYTORCH_TENSOREXPR_\w+|"
    r"TORCH_JIT_DISABLE_NEW_EXECUTOR"
)
"""Environment variables that influence speed, which a judge records with its measurements."""


def host_fingerprint() -> dict[str, Any]:
    """Host record of a measurement: CPU, kernel and limits of the process.

    Never part of a key.
    """
    import archspec.cpu.detect

    names = sorted(filter(_OF_SPEED.fullmatch, os.environ))
    return {
        "cpu": archspec.cpu.detect.brand_string(),
        "machine": platform.machine(),
        "classes": list(detect().classes),
        "num_cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "kernel": platform.release(),
        "environment": {name: os.environ[name] for name in names},
    }
