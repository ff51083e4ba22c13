"""`python -m freezer.freezing.judging.calling_process`: call a payload in a fresh process for as
long as its parent asks.

The first line of stdin is an `Opening` as JSON; the answer is the digest of the first call's
outputs. Every further line is a duration in milliseconds; the process calls for that long, and
answers with the times of the calls, the page faults meanwhile and the CPU time since the last
answer.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from freezer.codec import decode
from freezer.freezing.judging.cold_start import Opening
from freezer.spec import bind


def main() -> None:
    """Open the payload, and answer each line of stdin with one line of JSON, until stdin ends."""
    with open(1, "w", closefd=False) as answers:
        sys.stdout = sys.stderr  # a payload may print
        call, digest = _opened(
            decode(Opening, json.loads(sys.stdin.readline()), origin="the request")
        )
        print(json.dumps({"digest": digest}), file=answers, flush=True)
        used_s = time.process_time()
        for line in sys.stdin:
            block = _block(call, float(line))
            before_s, used_s = used_s, time.process_time()
            print(json.dumps({**block, "cpu_s": used_s - before_s}), file=answers, flush=True)


def _opened(opening: Opening) -> tuple[Callable[[], Any], str]:
    """The call of the payload with the first input set, and the digest of its first outputs."""
    import torch

    from freezer.runtime.payloads import LOADERS
    from freezer.runtime.pytree import leaves_of
    from freezer.runtime.tensors import load_tensors

    torch.set_num_threads(opening.num_threads)
    torch.manual_seed(0)
    golden = load_tensors(opening.folder / opening.inputs)
    tensors = {item.name: golden[f"0/{item.name}"] for item in opening.spec.tensors}
    args, kwargs = (
        bind(opening.spec, tensors)
        if opening.payload.convention == "native"
        else (list(tensors.values()), {})
    )
    run = LOADERS[opening.payload.kind](opening.folder / opening.payload.path, opening.settings)
    call = torch.no_grad()(partial(run, *args, **kwargs))
    digest = hashlib.sha256()
    for leaf in leaves_of(call()):
        digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return call, digest.hexdigest()


def _block(call: Callable[[], Any], block_ms: float) -> dict[str, Any]:
    """Times in milliseconds of calls for `block_ms`, and their minor page faults."""
    times_ms, faults = list[float](), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    while sum(times_ms) < block_ms:
        started = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - started) * 1e3)
    return {
        "times_ms": times_ms,
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    }


if __name__ == "__main__":
    main()
