"""`python -m freezer.freezing.packaging.cold_start`: load time, first call and peak memory of a candidate, in a fresh process.

The request is JSON on stdin, the answer one line of JSON on stdout. These figures are never part of the steady ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.artifact.sections import ColdStart
from freezer.codec import decode, encode
from freezer.errors import JudgeError
from freezer.hardware.peak_memory import peak_bytes
from freezer.spec.inputs import InputSpec

TIMEOUT_S = 300


def measure(
    payload: Path,
    kind: str,
    settings: Mapping[str, Any],
    inputs: Path,
    *,
    spec: InputSpec,
    native: bool,
    num_threads: int,
    device: str = "cpu",
) -> ColdStart:
    """Times in milliseconds and memory in 1e6 bytes, from a fresh process of the same environment.

    Args:
        payload, kind, settings: what to open, and the settings that it was made with.
        inputs: a file of tensors that holds `0/<path>` for each tensor input.
        spec: of the inputs.
        native: whether the payload is called as its source is, or with flat tensors.
        num_threads: intra-op threads.
        device: to open and call it on.

    Raises:
        JudgeError: the process fails or hangs.
    """
    request = {
        "payload": str(payload),
        "kind": kind,
        "settings": dict(settings),
        "inputs": str(inputs),
        "spec": encode(spec),
        "native": native,
        "num_threads": num_threads,
        "device": device,
    }
    command = [sys.executable, "-m", "freezer.freezing.packaging.cold_start"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environ
        )
    except subprocess.CalledProcessError as error:
        raise JudgeError(f"a fresh process could not open and call {payload.name}: {raised_in(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise JudgeError(f"a fresh process took over {TIMEOUT_S} s to open and call {payload.name}") from error
    return decode(ColdStart, json.loads(done.stdout.splitlines()[-1]), origin="the fresh process")


def raised_in(text: str) -> str:
    """The error at the end of what a process printed when it failed: its type and its first lines, without the traceback."""
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith(" ")]
    return " ".join(said[:2])[:500] or "no message"


def main(request: Mapping[str, Any]) -> dict[str, float]:
    """What this process takes to import torch, open the payload, and call it twice."""
    started = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from freezer.runtime.cuda import current, synchronize
    from freezer.runtime.devices import tensors_on
    from freezer.runtime.payloads import LOADERS
    from freezer.runtime.tensor_files import load_tensors
    from freezer.spec.inputs import bind

    torch.set_num_threads(request["num_threads"])
    device = torch.device(request["device"])
    spec, golden = decode(InputSpec, request["spec"], origin="request"), load_tensors(Path(request["inputs"]))
    tensors = tensors_on({item.name: golden[f"0/{item.name}"] for item in spec.tensors}, device)
    args, kwargs = bind(spec, tensors) if request["native"] else (list(tensors.values()), {})
    before_mb = _peak_mb()
    ready = time.perf_counter()
    times = []
    with current(device), torch.no_grad():
        run = LOADERS[request["kind"]](Path(request["payload"]), request["settings"], device)
        opened = time.perf_counter()
        for _ in range(2):
            called = time.perf_counter()
            run(*args, **kwargs)
            synchronize(device)
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
    return peak_bytes() / 1e6


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
