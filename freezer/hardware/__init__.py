"""Hardware: device classes, this machine, instruction sets, GPUs, control groups, peak memory.

May import: freezer.spec and below.
Read first: device_classes.py.
"""

from freezer.hardware.cgroups import (
    ROOT,
    available_cpus,
    counts_within,
    cpu_quota,
    machine_bytes,
    thread_budget,
)
from freezer.hardware.cuda import (
    CudaHere,
    CudaNeeds,
    cuda_needs,
    cuda_version,
    least_driver,
)
from freezer.hardware.device_classes import (
    DEVICE_CLASSES,
    PORTABLE,
    DeviceClass,
    auto_classes,
    best_level,
    can_run,
    device_class,
    packed_dtype,
)
from freezer.hardware.machine import (
    Host,
    Machine,
    describe_host,
    detect,
    this_host,
)
from freezer.hardware.memory import (
    own_process,
    peak_bytes,
    peak_memory,
)
from freezer.hardware.nvml import (
    NvmlError,
    num_other_processes,
    opened,
)

__all__ = [
    "DEVICE_CLASSES",
    "PORTABLE",
    "ROOT",
    "CudaHere",
    "CudaNeeds",
    "DeviceClass",
    "Host",
    "Machine",
    "NvmlError",
    "auto_classes",
    "available_cpus",
    "best_level",
    "can_run",
    "counts_within",
    "cpu_quota",
    "cuda_needs",
    "cuda_version",
    "describe_host",
    "detect",
    "device_class",
    "least_driver",
    "machine_bytes",
    "num_other_processes",
    "opened",
    "own_process",
    "packed_dtype",
    "peak_bytes",
    "peak_memory",
    "this_host",
    "thread_budget",
]
