"""Checks of this machine: torch, compiler, device classes, threads, memory, temporary folder.

What freezing needs is imported when a check runs, as an import of torch may fail.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from freezer.checks.findings import CheckRequest, Finding, Level
from freezer.errors import UsageError, first_line, last_line
from freezer.files import VARIABLE, scratch_folder, scratch_place
from freezer.hardware import (
    PORTABLE,
    ROOT,
    Host,
    available_cpus,
    describe_host,
    machine_bytes,
    this_host,
)

LEAST_MEMORY_BYTES = 2e9
"""Below this, freezing a small model may fail: torch and Inductor use about 1 GB, and each worker
more.
"""

LEAST_FREE_BYTES = 1e9
"""Free disk space below which a build may fail."""

PROGRAM = """
#include <omp.h>
#include <vector>
extern "C" int coldpress_sum(int n) {
    std::vector<int> x(n, 1);
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < n; ++i) sum += x[i];
    return sum;
}
"""
"""A shared library with OpenMP, as Inductor builds them."""

COMPILE_LIMIT_S = 60

_COMPILE = "-std=c++17 -O1 -fPIC -fopenmp -shared -o program.so program.cpp"

_INSTALL = "apt-get install g++ binutils   # or: dnf install gcc-c++ binutils"


def check_torch(_: CheckRequest) -> Iterator[Finding]:
    """Whether torch can be imported, and its build."""
    from freezer.freezing.environment import torch_versions

    try:
        versions = torch_versions()
    except Exception as error:  # a missing library, another ABI of numpy, a broken installation
        text = f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        yield Finding("torch", text, "error", "python -m pip install --force-reinstall torch")
        return
    device = f"CUDA {versions['cuda']}" if versions["cuda"] else "CPUs"
    python = platform.python_version()
    yield Finding("torch", f"{versions['torch']}, built for {device}; Python {python}")


def check_compiler(request: CheckRequest) -> Iterator[Finding]:
    """Whether the C++ compiler builds a shared library with OpenMP, and objdump is there to check
    its instructions.
    """
    from freezer.freezing.environment import compiler

    level: Level = "error" if request.campaigns else "warning"
    command = compiler()
    problem = None
    for tool in (command, "objdump"):
        if shutil.which(tool) is None:
            problem = f"{tool!r} is not in PATH"
            break
    else:
        problem = _compile_problem(command)
    if problem is None:
        yield Finding("compiler", f"{command!r} builds shared libraries with OpenMP")
    else:
        text = f"{problem}; freezing with Inductor needs it, and serving does not"
        yield Finding("compiler", text, level, _INSTALL)


def _compile_problem(command: str) -> str | None:
    """Build PROGRAM as a build would, without variables that builds ignore; return the compiler's
    first error, if there is one.
    """
    from freezer.freezing.environment import cleared

    with scratch_folder() as folder, cleared():
        (Path(folder) / "program.cpp").write_text(PROGRAM)
        try:
            done = subprocess.run(
                [command, *_COMPILE.split()],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=COMPILE_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command!r} cannot be run: {last_line(error)}"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    message = lines[0] if lines else f"exit code {done.returncode}"
    return f"{command!r} cannot build a shared library with OpenMP: {message}"


def check_classes(_: CheckRequest) -> Iterator[Finding]:
    """The device classes that this process serves, and why not better ones."""
    yield classes_finding(this_host(), os.environ)


def classes_finding(
    host: Host,
    environ: Mapping[str, str],
) -> Finding:
    """Report the device classes of a host to a process with this environment."""
    machine = describe_host(host, environ)
    text = ", ".join(machine.classes)
    for name, why in machine.next_better.items():
        text += f"; not {name}: {why}"
    if machine.hardware is not None and machine.hardware not in machine.classes:
        names = [limit.partition("=")[0] for limit in machine.limits.split()]
        return Finding("device classes", text, "warning", f"unset {' '.join(names)}")
    if machine.classes == (PORTABLE,):
        remedy = "lscpu   # a virtual machine may hide features: qemu -cpu host"
        text += "; only portable artifacts serve here"
        return Finding("device classes", text, "warning", remedy)
    return Finding("device classes", text)


def check_threads(_: CheckRequest) -> Iterator[Finding]:
    """Compare torch's threads with the CPUs that this process may use."""
    import torch

    num_threads, num_cpus = torch.get_num_threads(), available_cpus()
    text = f"torch uses {num_threads}, and this process may use {num_cpus} of {os.cpu_count()} CPUs"
    if num_threads <= num_cpus:
        yield Finding("threads", text)
    else:
        text += " by its affinity and quota: they wait for each other, which slows calls down"
        yield Finding("threads", text, "warning", f"export OMP_NUM_THREADS={num_cpus}")


def check_gpus(_: CheckRequest) -> Iterator[Finding]:
    """Whether torch can use the GPUs of the machine, if it has any."""
    from freezer.runtime.devices import no_cuda

    problem = no_cuda() if this_host().gpus else None
    if problem is not None:
        remedy = "nvidia-smi   # its CUDA version must be torch's or later, for a torch with CUDA"
        yield Finding("GPU", f"torch cannot use it: {problem}", "warning", remedy)


def check_memory(_: CheckRequest, root: Path = ROOT) -> Iterator[Finding]:
    """Memory of the machine or the container whose files are below `root`."""
    limit = machine_bytes(root)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    available = min(limit, free)
    text = f"{limit / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
    if available >= LEAST_MEMORY_BYTES:
        yield Finding("memory", text)
    else:
        text += f"; freezing may need more than {LEAST_MEMORY_BYTES / 1e9:.0f} GB"
        remedy = "docker update --memory 8g CONTAINER   # or stop what `ps --sort -rss` shows"
        yield Finding("memory", text, "warning", remedy)


def check_temporary(_: CheckRequest) -> Iterator[Finding]:
    """Whether files that contain code can be written and opened in the temporary folder, and its
    free space.
    """
    remedy = f"export {VARIABLE}=/var/tmp   # or another folder that allows it"
    try:
        folder = scratch_place(executable=True)
    except UsageError as error:
        yield Finding("temporary folder", error.coded, "error", remedy)
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / 1e9:.1f} GB free"
    if free >= LEAST_FREE_BYTES:
        yield Finding("temporary folder", text)
    else:
        text += f"; expected {LEAST_FREE_BYTES / 1e9:.0f} GB or more"
        yield Finding("temporary folder", text, "warning", remedy)
