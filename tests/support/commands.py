"""Commands that end: their output, and commands that must succeed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner, Result

from tests.support.raylets import ROOT

Done = subprocess.CompletedProcess[str]

OPEN_RAW = """
import sys
import torch
torch.set_num_threads(int(sys.argv[2]))
runner = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
(output,) = runner.run([torch.ones(*map(int, sys.argv[3:]))])
print("answered", tuple(output.shape), flush=True)
"""
"""Program that opens an Inductor payload without the loader: PAYLOAD THREADS SIZE..."""


def sampling(time_limit_s: float, warmup_s: float, min_rounds: int) -> str:
    """Code after which a process samples quickly, also on a busy machine; commands have no option
    for that.
    """
    changed = {"time_limit_s": time_limit_s, "warmup_s": warmup_s, "min_rounds": min_rounds}
    return f"""
from freezer.spec.limits import SamplingPolicy
for name, value in {changed | {"busy_limit": 2.0, "steal_limit": 2.0}}.items():
    SamplingPolicy.__dataclass_fields__[name].default = value
"""


def finished(
    *command: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 550,
) -> Done:
    """Run a command to its end, and keep its output."""
    return subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def output(*command: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command in a folder, and return its output; the test fails if the command does."""
    done = finished(*command, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def invoked(app: typer.Typer, *words: object, **options: Any) -> Result:
    """Run a command in this process, and keep its output and its exception."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def together(code: str, arguments: Sequence[Sequence[object]]) -> list[str]:
    """Run code in several interpreters, and return what each prints; each prints `ready` and then
    reads a line, which comes when all are ready.
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for given in arguments
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return [child.communicate(timeout=120)[0] for child in children]
