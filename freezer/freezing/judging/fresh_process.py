"""Load time, first call and peak memory of a payload: the program of a fresh process.

Run as a file, so that no package imports torch before it is measured. The request is a line of
JSON on stdin, the answer one on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from freezer.artifact import ColdStart, Payload
from freezer.codec import JsonView, decode, encode, frozen
from freezer.hardware import peak_bytes
from freezer.spec import InputSpec, bind


@frozen
class Opening:
    """What the fresh process opens and calls.

    Attributes:
        folder: folder with the payload.
        inputs: file with the inputs, set 0 for the timed calls, and sets of further sizes.
        num_sets: number of sets.
        settings: recipe settings that the payload was built with.
        num_threads: number of intra-op threads.
    """

    folder: Path
    payload: Payload
    settings: JsonView
    spec: InputSpec
    num_threads: int
    inputs: Path
    num_sets: int
    device: str


def main(opening: Opening) -> ColdStart:
    """Import torch, open the payload, call it twice, and once with each further size; return the
    times of opening and of the first two calls, and the memory of all.
    """
    started = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from freezer.runtime.devices import current, tensors_on
    from freezer.runtime.loaders import LOADERS
    from freezer.runtime.tensor_files import load_tensors

    torch.set_num_threads(opening.num_threads)
    device, payload = torch.device(opening.device), opening.payload
    loaded = tensors_on(load_tensors(opening.inputs), device)
    calls = [_arguments(opening, index, loaded) for index in range(opening.num_sets)]
    memory_before_mb = peak_bytes() / 1e6
    with current(device), torch.no_grad():
        times = [time.perf_counter()]
        run = LOADERS[payload.kind](opening.folder / payload.path, opening.settings, device)
        times.append(time.perf_counter())
        for args, kwargs in (calls[0], *calls):
            run(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())
    open_ms, first_call_ms, second_call_ms = (
        (end - start) * 1e3 for start, end in pairwise(times[:4])
    )
    return ColdStart(
        import_torch_ms=(imported - started) * 1e3,
        open_ms=open_ms,
        first_call_ms=first_call_ms,
        second_call_ms=second_call_ms,
        memory_before_mb=memory_before_mb,
        memory_peak_mb=peak_bytes() / 1e6,
    )


def _arguments(
    opening: Opening, index: int, loaded: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with one of the sets."""
    tensors = {item.name: loaded[f"{index}/{item.name}"] for item in opening.spec.tensors}
    if opening.payload.convention == "native":
        return bind(opening.spec, tensors)
    return [*tensors.values()], {}


if __name__ == "__main__":
    print(
        json.dumps(
            encode(main(decode(Opening, json.loads(sys.stdin.readline()), origin="the request")))
        )
    )
