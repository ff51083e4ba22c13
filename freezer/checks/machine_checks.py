"""Checks of this machine's hardware and of what else runs on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from freezer.checks.findings import CheckRequest, Finding
from freezer.errors import UsageError
from freezer.freezing.environment import check_environment
from freezer.hardware import (
    PORTABLE,
    Host,
    available_cpus,
    cuda_version,
    describe_host,
    device_class,
    least_driver,
    this_host,
)
from freezer.spec import SamplingPolicy

WATCH_S = 1.0
"""Time for which other processes are watched."""

CUDA_BUILD = "https://pytorch.org/get-started/locally"


def check_classes(_: CheckRequest) -> Iterator[Finding]:
    """The device classes that this process serves, and why not better ones."""
    yield classes_finding(this_host(), os.environ)


def classes_finding(host: Host, environ: Mapping[str, str]) -> Finding:
    """Report the device classes of a host to a process with this environment."""
    machine = describe_host(host, environ)
    better = "".join(
        f"; not {name}: {why}" for name, why in machine.next_better.items() if name != "cuda"
    )
    text = f"{', '.join(machine.classes)}{better}"
    if (
        machine.classes
        != describe_host(host, {**environ, **dict.fromkeys(_limits(environ), "")}).classes
    ):
        return Finding(
            check="device classes",
            level="warning",
            text=text,
            remedy=f"unset {' '.join(_limits(environ))}",
        )
    if machine.classes == (PORTABLE,):
        remedy = (
            "lscpu | grep -i flags   # a virtual machine may hide features: give it the host's CPU"
            " model (qemu -cpu host)"
        )
        return Finding(
            check="device classes",
            level="warning",
            text=f"{text}; only portable artifacts serve here",
            remedy=remedy,
        )
    return Finding(check="device classes", text=text)


def _limits(environ: Mapping[str, str]) -> list[str]:
    variables = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    return [name for name in variables if environ.get(name)]


def check_environment_here(_: CheckRequest) -> Iterator[Finding]:
    """Variables with which builds and judges refuse to run."""
    machine = describe_host(this_host(), os.environ)
    try:
        check_environment(device_class(machine.classes[0]))
    except UsageError as error:
        yield Finding(
            check="environment",
            level="error",
            text=error.coded,
            remedy=f"unset {str(error).partition('=')[0]}",
        )
        return
    yield Finding(check="environment", text="no variable changes numbers or packed weights")


def check_gpu(_: CheckRequest) -> Iterator[Finding]:
    """The NVIDIA driver, the GPUs, and whether torch can use them."""
    import torch

    from freezer.runtime.devices import no_cuda

    host = this_host()
    yield gpu_finding(host, os.environ, torch.version.cuda, no_cuda() if host.gpus else None)


def gpu_finding(
    host: Host, environ: Mapping[str, str], cuda: str | None, no_cuda: str | None
) -> Finding:
    """Report the GPUs of a host.

    Args:
        host: with or without GPUs.
        environ: of the process.
        cuda: CUDA version of torch's build; None for CPUs only.
        no_cuda: why torch cannot use the GPUs; None if it can.
    """
    if not host.gpus:
        if host.no_gpu == "no NVIDIA driver":
            return Finding(check="GPU", text="no NVIDIA driver, so no class of a GPU")
        return Finding(
            check="GPU",
            level="warning",
            text=host.no_gpu,
            remedy="nvidia-smi   # shows the driver's own error",
        )
    names = ", ".join(
        dict.fromkeys(f"{gpu.name or 'GPU'} (cuda-sm{gpu.capability})" for gpu in host.gpus)
    )
    text = f"{len(host.gpus)} of {names}, driver {host.driver}"
    least = least_driver(cuda)
    if cuda is None:
        remedy = f"python -m pip install torch   # a build for CUDA: {CUDA_BUILD}"
        return Finding(
            check="GPU",
            level="warning",
            text=f"{text}; torch is built for CPUs only",
            remedy=remedy,
        )
    if least and host.driver and cuda_version(host.driver) < cuda_version(least):
        remedy = (
            f"nvidia-smi   # update the driver to {least}, or install torch for an older CUDA:"
            f" {CUDA_BUILD}"
        )
        return Finding(
            check="GPU",
            level="error",
            text=f"{text}; torch's CUDA {cuda} needs driver {least} or later",
            remedy=remedy,
        )
    if environ.get("CUDA_VISIBLE_DEVICES") is not None and no_cuda:
        remedy = "unset CUDA_VISIBLE_DEVICES"
        return Finding(
            check="GPU",
            level="warning",
            text=f"{text}; CUDA_VISIBLE_DEVICES hides all of them",
            remedy=remedy,
        )
    if no_cuda:
        remedy = "python -c 'import torch; torch.cuda.init()'   # shows torch's own error"
        return Finding(check="GPU", level="error", text=f"{text}; {no_cuda}", remedy=remedy)
    return Finding(check="GPU", text=f"{text}; torch uses CUDA {cuda}")


def check_threads(_: CheckRequest) -> Iterator[Finding]:
    """Compare torch's threads with the CPUs that this process may use."""
    import torch

    num_threads, num_cpus = torch.get_num_threads(), available_cpus()
    text = (
        f"torch uses {num_threads} thread{'' if num_threads == 1 else 's'}, on {num_cpus}"
        f" CPU{'' if num_cpus == 1 else 's'}"
    )
    if num_threads <= num_cpus:
        yield Finding(check="threads", text=text)
        return
    yield Finding(
        check="threads",
        level="warning",
        text=f"{text}: they wait for each other, which can make calls many times slower",
        remedy=f"export OMP_NUM_THREADS={num_cpus}",
    )


def check_neighbours(_: CheckRequest) -> Iterator[Finding]:
    """What other processes and the hypervisor take from the CPUs, by the meter and the limits of a
    judge.
    """
    from freezer.timing import CpuMeter

    meter = CpuMeter(SamplingPolicy())
    time.sleep(WATCH_S)
    disturbed, text = meter.disturbed(), meter.disturbance()
    if not disturbed:
        yield Finding(check="neighbours", text=text)
        return
    yield Finding(
        check="neighbours",
        level="warning",
        text=f"{text}; a judge drops such rounds, and reports 'unstable' if too few remain",
        remedy="top -b -n 1 -o %CPU | head -15   # stop them, or judge on another machine",
    )
