"""`python -m freezer.coldstart FOLDER`: load time, first call and peak memory of a candidate, measured in a fresh process.

FOLDER holds a candidate's payloads and request.json; one line of JSON is printed. These figures are never part of the steady ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freezer.errors import JudgeError

TIMEOUT_S = 300


def measure(
    payload: Path,
    kind: str,
    inputs: Path,
    names: Sequence[str],
    *,
    constants: Mapping[str, Any],
    native: bool,
    keyword: bool,
    num_threads: int,
) -> dict[str, float]:
    """Times in milliseconds and memory in 1e6 bytes, from a fresh process of the same environment.

    Args:
        payload, kind: what to open.
        inputs: a safetensors file that holds `0/<name>` for each name.
        names: of all inputs in order, constants among them.
        constants: by name.
        native, keyword: how the payload is called.
        num_threads: intra-op threads.

    Raises:
        JudgeError: the process fails or hangs.
    """
    request = {
        "payload": str(payload),
        "kind": kind,
        "inputs": str(inputs),
        "names": list(names),
        "constants": dict(constants),
        "native": native,
        "keyword": keyword,
        "num_threads": num_threads,
    }
    command = [sys.executable, "-m", "freezer.coldstart", json.dumps(request)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environ)
    except subprocess.CalledProcessError as error:
        raise JudgeError(f"a fresh process could not open and call {payload.name}: {error.stderr[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise JudgeError(f"a fresh process took over {TIMEOUT_S} s to open and call {payload.name}") from error
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(request: Mapping[str, Any]) -> dict[str, float]:
    """What this process takes to import torch, open the payload, and call it twice."""
    started = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from safetensors.torch import load_file

    from freezer.build import lowering_module

    torch.set_num_threads(request["num_threads"])
    golden = load_file(request["inputs"])
    before_mb = _peak_mb()
    ready = time.perf_counter()
    run = lowering_module(request["kind"]).open_payload(Path(request["payload"]))
    opened = time.perf_counter()
    tensors = {name: golden[f"0/{name}"] for name in request["names"] if f"0/{name}" in golden}
    values = {**request["constants"], **tensors}
    args = [values[name] for name in request["names"]] if request["native"] else list(tensors.values())
    keyword = request["native"] and request["keyword"]
    times = []
    for _ in range(2):
        called = time.perf_counter()
        with torch.no_grad():
            run(**values) if keyword else run(*args)
        times.append(time.perf_counter() - called)
    return {
        "import_torch_ms": (imported - started) * 1e3,
        "open_ms": (opened - ready) * 1e3,
        "first_call_ms": times[0] * 1e3,
        "second_call_ms": times[1] * 1e3,
        "memory_before_mb": before_mb,
        "memory_peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
