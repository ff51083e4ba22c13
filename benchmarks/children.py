"""Jobs of benchmarks in processes of their own: `python -m benchmarks.children MODULE JOB` runs an
entry of a module's `JOBS`.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.pages import ROOT

RESULT = "benchmark-result:"
TIMEOUT_S = 6 * 3600.0


def start(
    module: str, job: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a job.

    Args:
        module: the module in `benchmarks` with the job.
        job: its name, as `do`, and its arguments.
        environ: the whole environment; None is this process's.
    """
    command = [sys.executable, "-m", "benchmarks.children", module, json.dumps(job)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a job and return its result.

    Raises:
        RuntimeError: it ended without a result.
    """
    output, _ = child.communicate(timeout=TIMEOUT_S)
    for line in output.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    raise RuntimeError(f"{child.args!r} ended with exit code {child.returncode}:\n{output[-3000:]}")


def main(module: str, text: str) -> None:
    """Run a job and print its result."""
    job = json.loads(text)
    result = importlib.import_module(f"benchmarks.{module}").JOBS[job["do"]](job)
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
