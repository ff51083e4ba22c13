"""`coldpress doctor` in processes of its own: what it finds on this machine and on worse ones, and
its exit codes.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("coldpress"))

Findings = dict[str, dict[str, Any]]


def doctor(
    *arguments: object, command: tuple[str, ...] = (COMMAND,), **environ: str
) -> tuple[int, Findings]:
    """The exit code and the findings by check."""
    full = [*command, "doctor", "--json", *map(str, arguments)]
    done = subprocess.run(
        full,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    findings = {item["check"]: item for item in found["findings"]}
    levels = [item["level"] for item in found["findings"]]
    assert (found["num_errors"], found["num_warnings"]) == (
        levels.count("error"),
        levels.count("warning"),
    )
    assert len(findings) == len(levels)
    assert all(bool(item["remedy"]) == (item["level"] != "ok") for item in findings.values())
    return done.returncode, findings


def test_doctor_without_errors_exits_with_0(tmp_path: Path) -> None:
    code, findings = doctor("--store", tmp_path, RAY_ADDRESS="")
    assert code == 0, findings
    assert list(findings) == [
        *(
            "torch",
            "device classes",
            "environment",
            "CPUs",
            "memory",
            "temporary folder",
            "clock source",
            "compiler",
            "GPU",
        ),
        *("threads", "neighbours", "Ray", "MLflow", "store", "store space", "store clock"),
    ]
    for check in ("torch", "compiler", "clock source", "Ray", "MLflow", "store", "store clock"):
        assert findings[check]["level"] == "ok", findings[check]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_problems(tmp_path: Path) -> None:
    """No compiler, limited instructions, variables that change numbers, and no store."""
    code, findings = doctor(
        *("--store", tmp_path / "none"),
        PATH=str(tmp_path),
        ONEDNN_MAX_CPU_ISA="SSE41",
        ONEDNN_DEFAULT_FPMATH_MODE="BF16",
        COLDPRESS_TMPDIR="/proc",
        RAY_ADDRESS="",
    )
    assert code == 1
    levels = {check: item["level"] for check, item in findings.items()}
    assert [
        levels[name] for name in ("compiler", "objdump", "environment", "temporary folder", "store")
    ] == ["error"] * 5
    assert levels["device classes"] == "warning"
    assert "'g++' is not in PATH" in findings["compiler"]["text"]
    assert findings["device classes"]["remedy"] == "unset ONEDNN_MAX_CPU_ISA"
    assert findings["environment"]["remedy"] == "unset ONEDNN_DEFAULT_FPMATH_MODE"
    assert "CP-STORE-UNREACHABLE" in findings["store"]["text"]


def test_a_compiler_that_cannot_compile(tmp_path: Path) -> None:
    (tmp_path / "cxx").write_text(
        '#!/bin/sh\necho "program.cpp:2:10: fatal error: omp.h: No such file or directory"'
        " >&2\nexit 1\n"
    )
    (tmp_path / "cxx").chmod(0o755)
    code, findings = doctor(CXX=str(tmp_path / "cxx"), RAY_ADDRESS="")
    assert (code, findings["compiler"]["level"]) == (1, "error")
    assert "fatal error: omp.h: No such file" in findings["compiler"]["text"]


def test_a_broken_torch_is_an_error(tmp_path: Path) -> None:
    start = (
        "import sys; sys.modules['torch'] = None; from freezer.cli import main; sys.argv[0] ="
        " 'coldpress'; main()"
    )
    code, findings = doctor(command=(sys.executable, "-c", start), RAY_ADDRESS="")
    assert (code, findings["torch"]["level"]) == (1, "error")
    assert "pip install" in findings["torch"]["remedy"]
    assert not {"threads", "neighbours", "GPU"} & set(findings)


def test_a_busy_neighbour_is_named() -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        neighbours = doctor(RAY_ADDRESS="")[1]["neighbours"]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert neighbours["level"] == "warning"
    assert "most active: python" in neighbours["text"]


@pytest.mark.slow
def test_a_real_quota_is_reported(limited_group: Path) -> None:
    """One CPU, in which torch starts a thread for each CPU of the machine; then a fraction
    of one.
    """
    code = (
        "import os, sys; open(sys.argv.pop(1), 'w').write(str(os.getpid())); from freezer.cli"
        " import main; main()"
    )
    command = (sys.executable, "-c", code, str(limited_group / "cgroup.procs"))
    if len(os.sched_getaffinity(0)) > 1:
        findings = doctor(command=command, RAY_ADDRESS="", OMP_NUM_THREADS="2")[1]
        assert findings["CPUs"]["text"].endswith("and its control group 1")
        assert findings["threads"]["remedy"] == "export OMP_NUM_THREADS=1"
    quota = limited_group / "cpu.max"
    if quota.exists():
        quota.write_text("50000 100000")
    else:
        (limited_group / "cpu.cfs_quota_us").write_text("50000")
    cpus = doctor(command=command, RAY_ADDRESS="")[1]["CPUs"]
    assert cpus["level"] == "warning"
    assert cpus["remedy"].startswith("docker update --cpus 1 CONTAINER")


def in_a_terminal(environ: Mapping[str, str], *arguments: str) -> str:
    """The output of the command on a terminal."""
    parent, child = pty.openpty()
    command = [COMMAND, *arguments]
    process = subprocess.Popen(
        command, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm-256color", **environ}
    )
    os.close(child)
    output = b""
    while True:
        try:
            read = os.read(parent, 4096)
        except OSError:  # the command has ended
            break
        if not read:
            break
        output += read
    os.close(parent)
    process.wait()
    return output.decode()


@pytest.mark.parametrize(
    "arguments", [("doctor", "--store", "/none"), ("list", "--store", "/none"), ("classes",)]
)
def test_no_color_means_no_escape_codes(arguments: tuple[str, ...]) -> None:
    if arguments != ("classes",):
        assert "\x1b[" in in_a_terminal({"NO_COLOR": ""}, *arguments)
    plain = in_a_terminal({"NO_COLOR": "1"}, *arguments)
    assert plain
    assert "\x1b" not in plain
