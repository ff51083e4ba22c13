"""Devices of this process, numbered as by torch: choose a GPU of a device class, describe it, and
move tensors to it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freezer.errors import UsageError
from freezer.hardware import CudaHere, DeviceClass, Machine, detect, this_host
from freezer.runtime.contract import unflatten
from freezer.runtime.tensors import flatten

CPU = torch.device("cpu")

DEPTH = 3
"""Nesting of lists, tuples and dicts within which tensors in attributes are found."""


def tensors_on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device, with their strides."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def called_on(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap a function on a device, so that it takes and returns tensors on the CPU."""
    if device.type == "cpu":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = moved_to_device([args, kwargs], device, DEPTH + 1)
        structure, leaves = flatten(function(*args, **kwargs))
        return unflatten(structure, [leaf.cpu() for leaf in leaves])

    return call


def moved_to_device(value: Any, device: torch.device, depth: int) -> Any:
    """The value with its tensors on a device; the value itself if all of them are there already."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if not depth or type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if isinstance(value, dict) else list(value)
    moved = [moved_to_device(item, device, depth - 1) for item in items]
    if all(one is other for one, other in zip(moved, items, strict=True)):
        return value
    return dict(zip(value, moved, strict=True)) if isinstance(value, dict) else type(value)(moved)


def no_cuda() -> str | None:
    """Why this process has no CUDA; None where it has.

    Starts the driver through torch: afterwards, a forked child must not use a GPU.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build of torch for CUDA"
    if torch.cuda.is_available():
        return None
    driver = f"driver {this_host().driver}" if this_host().driver else this_host().no_gpu
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
    wanted: DeviceClass, machine: Machine, asked: str | torch.device | None = None
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
    device, gpus = None if asked is None else with_index(asked), dict(visible())
    fitting = [gpu for gpu, capability in gpus.items() if capability == wanted.capability]
    seen = ", ".join(f"{gpu} is cuda-sm{capability}" for gpu, capability in gpus.items())
    problem = no_cuda()
    if problem is None and wanted.host not in machine.classes:
        why_not = machine.why_not.get(str(wanted.host), "the CPU is of another kind")
        problem = (
            f"its host code is made for {wanted.host}, which this process cannot run: {why_not}"
        )
    elif problem is None and device is None and fitting:
        default = torch.device("cuda", torch.cuda.current_device())
        return default if default in fitting else fitting[0]
    elif device is not None and device in fitting:
        return device
    elif problem is None and device is not None:
        problem = (
            f"got {device}, but here {seen}; name a device of the class, or the device's class"
        )
    problem = problem or f"no GPU that this process sees has this compute capability: {seen}"
    raise _no_device(f"this process cannot build for {wanted.name}: {problem}")


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


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one of this thread for a block: kernels run on the current GPU's
    stream.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def gpu_versions(device: torch.device) -> dict[str, Any]:
    """Versions besides torch's that influence a payload for a GPU: driver, GPU, cuDNN and Triton;
    empty for a CPU.
    """
    if device.type != "cuda":
        return {}
    found: dict[str, Any] = {
        "driver": this_host().driver,
        "gpu": torch.cuda.get_device_name(device),
    }
    found["cudnn"] = str(torch.backends.cudnn.version())
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found


def facts_of(device: torch.device) -> dict[str, Any]:
    """Describe a GPU in the host record of a measurement."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "driver": this_host().driver,
        "runtime": torch.version.cuda,
    }


def nvml_uuid(device: torch.device) -> str:
    """UUID of a GPU in NVML."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


_OF_SPEED = re.compile(
    r"(?:OMP|KMP|GOMP|MKL|ONEDNN|DNNL|ATEN|MALLOC|TORCH_MKLDNN)_\w+|LD_PRELOAD|GLIBC_TUNABLES|THP_MEM_ALLOC_ENABLE|"
    r"TORCH_LINEAR_FLATTEN_3D|PYTORCH_TENSOREXPR_\w+|TORCH_JIT_DISABLE_NEW_EXECUTOR"
)


def _recorded() -> dict[str, str]:
    """Environment variables that influence speed, which a judge records with its measurements."""
    return {name: value for name, value in sorted(os.environ.items()) if _OF_SPEED.fullmatch(name)}


def host_fingerprint(device: torch.device = CPU) -> dict[str, Any]:
    """Host record of a measurement: CPU, kernel, limits of the process, and GPU.

    Never part of a key.
    """
    import archspec.cpu.detect

    return {
        "cpu": archspec.cpu.detect.brand_string(),
        "classes": list(detect().classes),
        "num_cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "kernel": platform.release(),
        "environment": _recorded(),
        **({"gpu": facts_of(device)} if device.type == "cuda" else {}),
    }
