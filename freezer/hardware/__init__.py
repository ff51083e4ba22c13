"""Hardware: device classes, this machine, instruction sets, GPUs, control groups, peak memory.

May import: freezer.spec and below.
Read first: device_classes.py.
"""

from freezer.hardware.cuda import (
    CudaHere,
    CudaNeeds,
    NvmlError,
    cuda_needs,
    cuda_version,
    num_other_processes,
    opened,
)
from freezer.hardware.device_classes import (
    AUTO_PRECISE,
    DEVICE_CLASSES,
    PORTABLE,
    DeviceClass,
    auto_classes,
    best_level,
    can_run,
    device_class,
    lesser_classes,
    packed_dtype,
)
from freezer.hardware.machine import (
    Host,
    Machine,
    describe_host,
    detect,
    this_host,
)
from freezer.hardware.node_labels import node_expressions
from freezer.hardware.resources import (
    available_cpus,
    counts_within,
    default_threads,
    machine_bytes,
    own_process,
    peak_bytes,
    peak_memory,
    thread_budget,
)

__all__ = [
    "AUTO_PRECISE",
    "DEVICE_CLASSES",
    "PORTABLE",
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
    "cuda_needs",
    "cuda_version",
    "default_threads",
    "describe_host",
    "detect",
    "device_class",
    "lesser_classes",
    "machine_bytes",
    "node_expressions",
    "num_other_processes",
    "opened",
    "own_process",
    "packed_dtype",
    "peak_bytes",
    "peak_memory",
    "this_host",
    "thread_budget",
]
