"""`python -m freezer.freezing.judging.cold_start`: load time, first call and peak memory of a
payload in a fresh process.

The request is JSON on stdin, the answer one line of JSON on stdout. Steady latency never includes
these figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from freezer.artifact import GOLDEN_INPUTS, ColdStart, Payload
from freezer.codec import decode, encode
from freezer.errors import JudgeError
from freezer.hardware import peak_bytes
from freezer.spec import InputSpec, bind

TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What the fresh process opens and calls.

    Attributes:
        folder: contains the payload.
        inputs: file with the inputs, set 0, relative to the folder.
        settings: the recipe settings that the payload was built with.
        num_threads: intra-op threads.
    """

    folder: Path
    payload: Payload
    settings: Mapping[str, Any]
    spec: InputSpec
    num_threads: int
    device: str = "cpu"
    inputs: Path = Path(GOLDEN_INPUTS)


def measure(opening: Opening) -> ColdStart:
    """Measure a payload in a fresh process of the same environment. Times are in milliseconds,
    memory in 1e6 bytes.

    Raises:
        JudgeError: the process fails or hangs.
    """
    name, request = Path(opening.payload.path).name, json.dumps(encode(opening))
    command = [sys.executable, "-m", "freezer.freezing.judging.cold_start"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env=environ,
        )
    except subprocess.CalledProcessError as error:
        raise JudgeError(
            f"a fresh process could not open and call {name}: {raised_in(error.stderr)}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise JudgeError(
            f"a fresh process took over {TIMEOUT_S} s to open and call {name}"
        ) from error
    return decode(ColdStart, json.loads(done.stdout.splitlines()[-1]), origin="the fresh process")


def raised_in(text: str) -> str:
    """The error type and first lines from the stderr of a failed process, without its traceback."""
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    message = [line.strip() for line in lines if line.strip() and not line.startswith(" ")]
    return " ".join(message[:2])[:500] or "no message"


def main(opening: Opening) -> ColdStart:
    """Import torch, open the payload and call it twice; return the times and the memory."""
    started = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from freezer.runtime.devices import current, tensors_on
    from freezer.runtime.loaders import LOADERS
    from freezer.runtime.tensor_files import load_tensors

    torch.set_num_threads(opening.num_threads)
    device, payload = torch.device(opening.device), opening.payload
    golden = load_tensors(opening.folder / opening.inputs)
    tensors = tensors_on(
        {item.name: golden[f"0/{item.name}"] for item in opening.spec.tensors}, device
    )
    args, kwargs = (
        bind(opening.spec, tensors)
        if payload.convention == "native"
        else (list(tensors.values()), {})
    )
    memory_before_mb = peak_bytes() / 1e6
    with current(device), torch.no_grad():
        times = [time.perf_counter()]
        run = LOADERS[payload.kind](opening.folder / payload.path, opening.settings, device)
        times.append(time.perf_counter())
        for _ in range(2):
            run(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())
    open_ms, first_call_ms, second_call_ms = (
        (after - before) * 1e3 for before, after in pairwise(times)
    )
    return ColdStart(
        import_torch_ms=(imported - started) * 1e3,
        open_ms=open_ms,
        first_call_ms=first_call_ms,
        second_call_ms=second_call_ms,
        memory_before_mb=memory_before_mb,
        memory_peak_mb=peak_bytes() / 1e6,
    )


if __name__ == "__main__":
    print(json.dumps(encode(main(decode(Opening, json.load(sys.stdin), origin="the request")))))
