"""`python -m freezer.freezing.packaging.cold_start`: load time, first call and peak memory of a payload in a fresh process.

The request is JSON on stdin, the answer one line of JSON on stdout. Steady latency never includes these figures.
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

from freezer.artifact.folder import GOLDEN_INPUTS
from freezer.artifact.manifest import Payload
from freezer.artifact.sections import ColdStart
from freezer.codec import decode, encode
from freezer.errors import JudgeError
from freezer.hardware.peak_memory import peak_bytes
from freezer.spec.inputs import InputSpec

TIMEOUT_S = 300


def measure(
    folder: Path, payload: Payload, settings: Mapping[str, Any], *, spec: InputSpec, num_threads: int, device: str = "cpu"
) -> ColdStart:
    """Measure a payload in a fresh process of the same environment. Times are in milliseconds, memory in 1e6 bytes.

    Args:
        folder: contains the payload and the golden inputs.
        payload: the payload to open and call.
        settings: the recipe settings it was built with.
        spec: the input spec.
        num_threads: intra-op threads.
        device: the device to run on.

    Raises:
        JudgeError: the process fails or hangs.
    """
    request = {
        "payload": str(folder / payload.path),
        "kind": payload.kind,
        "settings": dict(settings),
        "inputs": str(folder / GOLDEN_INPUTS),
        "spec": encode(spec),
        "native": payload.convention == "native",
        "num_threads": num_threads,
        "device": device,
    }
    command = [sys.executable, "-m", "freezer.freezing.packaging.cold_start"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    name = Path(payload.path).name
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environ
        )
    except subprocess.CalledProcessError as error:
        raise JudgeError(f"a fresh process could not open and call {name}: {raised_in(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise JudgeError(f"a fresh process took over {TIMEOUT_S} s to open and call {name}") from error
    return decode(ColdStart, json.loads(done.stdout.splitlines()[-1]), origin="the fresh process")


def raised_in(text: str) -> str:
    """The error type and first lines from the stderr of a failed process, without its traceback."""
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    message = [line.strip() for line in lines if line.strip() and not line.startswith(" ")]
    return " ".join(message[:2])[:500] or "no message"


def main(request: Mapping[str, Any]) -> dict[str, float]:
    """Import torch, open the payload and call it twice; return the times and the memory."""
    started = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from freezer.runtime.devices import current, tensors_on
    from freezer.runtime.payloads import LOADERS
    from freezer.runtime.tensors import load_tensors
    from freezer.spec.inputs import bind

    torch.set_num_threads(request["num_threads"])
    device = torch.device(request["device"])
    spec, golden = decode(InputSpec, request["spec"], origin="the request"), load_tensors(Path(request["inputs"]))
    tensors = tensors_on({item.name: golden[f"0/{item.name}"] for item in spec.tensors}, device)
    args, kwargs = bind(spec, tensors) if request["native"] else (list(tensors.values()), {})
    before_mb = peak_bytes() / 1e6
    ready = time.perf_counter()
    times = []
    with current(device), torch.no_grad():
        run = LOADERS[request["kind"]](Path(request["payload"]), request["settings"], device)
        opened = time.perf_counter()
        for _ in range(2):
            called = time.perf_counter()
            run(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - called)
    return {
        "import_torch_ms": (imported - started) * 1e3,
        "open_ms": (opened - ready) * 1e3,
        "first_call_ms": times[0] * 1e3,
        "second_call_ms": times[1] * 1e3,
        "memory_before_mb": before_mb,
        "memory_peak_mb": peak_bytes() / 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
