"""Checks of what builds use: torch, the C++ compiler and objdump."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from freezer.checks.findings import CheckRequest, Finding, Level
from freezer.errors import first_line, last_line
from freezer.files import scratch_folder
from freezer.freezing.environment import cleared
from freezer.freezing.toolchain import compiler, torch_versions

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

_INSTALL = "apt-get install g++ binutils   # or: dnf install gcc-c++ binutils"


def check_torch(_: CheckRequest) -> Iterator[Finding]:
    """Whether torch can be imported, and its build."""
    try:
        versions = torch_versions()
    except Exception as error:  # a missing library, another ABI of numpy, a broken installation
        text = f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        yield Finding(
            check="torch",
            level="error",
            text=text,
            remedy="python -m pip install --force-reinstall torch",
        )
        return
    built = f"for CUDA {versions['cuda']}" if versions["cuda"] else "for CPUs only"
    onednn = f"oneDNN {versions['onednn']}" if versions["onednn"] else "no oneDNN"
    yield Finding(
        check="torch",
        text=(
            f"{versions['torch']}, built {built}, with {onednn}; Python {platform.python_version()}"
        ),
    )


def check_compiler(request: CheckRequest) -> Iterator[Finding]:
    """Whether the C++ compiler builds a shared library with OpenMP, and objdump is there to check
    its instructions.
    """
    level: Level = "error" if request.campaigns else "warning"
    needed = "freezing with Inductor needs it" + (
        "" if request.campaigns else ", and serving does not"
    )
    name = compiler()
    if shutil.which(name) is None:
        yield Finding(
            check="compiler",
            level=level,
            text=f"{name!r} is not in PATH; {needed}",
            remedy=_INSTALL,
        )
    elif (problem := _compile_problem(name)) is not None:
        text = f"{name!r} cannot build a shared library with OpenMP: {problem}; {needed}"
        yield Finding(check="compiler", level=level, text=text, remedy=_INSTALL)
    else:
        version = subprocess.run(
            [name, "--version"], capture_output=True, text=True, check=False
        ).stdout.partition("\n")[0]
        yield Finding(check="compiler", text=f"{version} builds shared libraries with OpenMP")
    if shutil.which("objdump") is None:
        text = "'objdump' is not in PATH; freezing with Inductor checks instructions with it"
        yield Finding(check="objdump", level=level, text=text, remedy=_INSTALL)


def _compile_problem(name: str) -> str | None:
    """Build PROGRAM as a build would, without variables that builds ignore; the compiler's first
    error, if there is one.
    """
    with scratch_folder() as folder, cleared():
        source = Path(folder) / "program.cpp"
        source.write_text(PROGRAM)
        command = [
            name,
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-fopenmp",
            "-shared",
            "-o",
            f"{folder}/program.so",
            str(source),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return last_line(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return next(
        (line for line in lines if "error" in line),
        lines[-1] if lines else f"exit code {done.returncode}",
    )
