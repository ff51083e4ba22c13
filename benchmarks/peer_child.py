"""The process of one entrant of benchmarks/peers.py: `python -m benchmarks.peer_child JOB`.

It builds the entrant, compares its outputs with eager's, and then runs a block of calls for each
line `{"block_ms": 60}` on stdin. Each answer is one line of JSON on stdout. Between blocks it waits
for a line. It answers once its threads no longer use the CPU: thread pools spin after a call, up to
a second in some engines, which would disturb the next entrant.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.peer_engines import Inputs
    from freezer.freezing.models import Subject
    from freezer.spec import InputSpec
    from pipeline.catalog import Entry

PREPARED = "prepared.pt"
"""In a model's folder: the spec, inputs and answers of eager, which is built first."""

WARM_UP_S = 1.0
WARM_UP_CALLS = 3
NUM_HELD_OUT, HELD_OUT_SEED = 128, 10_000
"""Held-out samples of a model, and the seed of the first; judges use smaller seeds."""

QUIET_STEP_S = 0.005
QUIET_LIMIT_S = 5.0
"""How long to wait until the threads are idle: less than a tenth of a CPU for two steps."""


def main(job: Mapping[str, Any]) -> None:
    """Build the entrant of a job, then serve blocks until stdin ends.

    Args:
        job: `peer`, `catalog`, `model`, `folder`, `store`, `tracking_uri` and `num_threads`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    try:
        calls, report = _ready(job)
    except Exception as error:
        traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {_first_line(error)}"})
        return
    _answer(answers, report)
    used_s = time.process_time()
    for line in sys.stdin:
        idle_cpu_s = time.process_time() - used_s
        next(calls)()  # caches and threads are cold
        samples = list(_block(calls, json.loads(line)["block_ms"]))
        spun_s = _wait_until_idle()
        used_s = time.process_time()
        _answer(answers, {"samples_ms": samples, "idle_cpu_s": idle_cpu_s, "spun_s": spun_s})
    os._exit(0)  # some engines take seconds to end, and nobody waits for it


def _ready(job: Mapping[str, Any]) -> tuple[Iterator[Callable[[], Any]], dict[str, Any]]:
    """The calls of the entrant, in a cycle over the inputs, and the report of its build."""
    import torch

    from benchmarks.peer_engines import PEERS, Case, arrays_of
    from freezer.freezing.models import load_source

    torch.set_num_threads(job["num_threads"])
    torch.set_grad_enabled(False)
    folder = Path(job["folder"])
    if job["peer"] == "eager":
        model, prepared = _prepare(job, folder)
    else:
        prepared = torch.load(folder / PREPARED, weights_only=False)
        model = load_source(prepared["source"])
    case = Case(
        name=job["model"],
        model=model,
        inputs=[_inputs(prepared["spec"], tensors) for tensors in prepared["inputs"]],
        num_threads=job["num_threads"],
        folder=folder,
        store=job["store"],
    )
    started = time.perf_counter()
    built = PEERS[job["peer"]].build(case)
    calls = [built.bind(inputs) for inputs in case.inputs]
    # The first call compiles where that is deferred; a later one may write into the memory of an
    # earlier result.
    got = [[tensor.clone() for tensor in arrays_of(call())] for call in calls]
    build_s = time.perf_counter() - started
    report = {"build_s": build_s, "note": built.note, **_drift(prepared["answers"], got)}
    del model, case, built, prepared, got
    gc.collect()
    _warm_up(calls)
    _wait_until_idle()
    return itertools.cycle(calls), report


def hold_out(job: Mapping[str, Any]) -> None:
    """Write a file of held-out samples of a model, which are generated.

    Args:
        job: `catalog`, `model`, `folder`, `tracking_uri`, and the file `held_out`.
    """
    from safetensors.torch import save_file

    from freezer.runtime.input_sets import generate_at

    subject, entry = _subject(job, Path(job["folder"]))
    spec, point = subject.spec, subject.spec.named_points(entry.points)[0]
    tensors: dict[str, Tensor] = {}
    for index in range(NUM_HELD_OUT):
        made = generate_at(spec, point, seed=HELD_OUT_SEED + index).tensors
        tensors |= {f"{index}/{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(tensors, job["held_out"])


def _subject(job: Mapping[str, Any], folder: Path) -> tuple[Subject, Entry]:
    """Load the model as a campaign does."""
    from pipeline.catalog import read_catalog
    from pipeline.planning import FileDigests
    from pipeline.sources import Materials
    from pipeline.worker.task_child import load_subject

    (entry,) = read_catalog(Path(job["catalog"]), only=[job["model"]]).entries
    materials = Materials(folder, job["tracking_uri"], FileDigests(folder / "digests.json"))
    (resolved,), _ = materials.resolve([entry])
    entry = materials.ready(resolved)
    return load_subject(entry), entry


def _prepare(job: Mapping[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """Write the source, spec, inputs and answers of a model for the other entrants."""
    import torch

    from benchmarks.peer_engines import arrays_of
    from freezer.runtime.input_sets import distinct_at

    subject, entry = _subject(job, folder)
    spec, point = subject.spec, subject.spec.named_points(entry.points)[0]
    sets = [dict(item.tensors) for item in distinct_at(spec, subject.sets, point)]
    model = subject.fresh()
    answers = []
    for tensors in sets:
        inputs = _inputs(spec, tensors)
        answers.append(arrays_of(model(*inputs.args, **inputs.kwargs)))
    prepared = {"source": entry.source, "spec": spec, "inputs": sets, "answers": answers}
    torch.save(prepared, folder / PREPARED)
    return model, prepared


def _inputs(spec: InputSpec, tensors: Mapping[str, Tensor]) -> Inputs:
    from benchmarks.peer_engines import Inputs
    from freezer.spec import bind

    args, kwargs = bind(spec, tensors)
    return Inputs(args=tuple(args), kwargs=kwargs)


def _drift(expected: Sequence[Sequence[Tensor]], got: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """The distance from eager over all inputs: the largest error, the signal-to-noise ratio, and
    how many discrete answers differ.

    The ratio is None without any error, and 0 where it cannot be computed.
    """
    max_abs_err, signal, noise, num_different = 0.0, 0.0, 0.0, 0
    for theirs, mine in zip(expected, got, strict=True):
        if [tuple(tensor.shape) for tensor in theirs] != [tuple(tensor.shape) for tensor in mine]:
            raise ValueError(
                f"outputs of {[tuple(t.shape) for t in mine]}, expected"
                f" {[tuple(t.shape) for t in theirs]}"
            )
        for one, other in zip(theirs, mine, strict=True):
            if not one.is_floating_point():
                num_different += int((one != other).sum())
                continue
            error = other.double() - one.double()
            max_abs_err = max(
                max_abs_err, float(error.abs().nan_to_num(math.inf).max()) if error.numel() else 0.0
            )
            signal += float(one.double().square().sum())
            noise += float(error.square().sum())
    usable = 0.0 < signal < math.inf and noise < math.inf  # neither is true of NaN
    sqnr_db = None if noise == 0.0 else 10 * math.log10(signal / noise) if usable else 0.0
    return {"max_abs_err": max_abs_err, "sqnr_db": sqnr_db, "num_different": num_different}


def _warm_up(calls: Sequence[Callable[[], Any]]) -> None:
    deadline, taken = time.perf_counter() + WARM_UP_S, 0
    while taken < WARM_UP_CALLS or time.perf_counter() < deadline:
        calls[taken % len(calls)]()
        taken += 1


def _block(calls: Iterator[Callable[[], Any]], block_ms: float) -> Iterator[float]:
    """Milliseconds of each call."""
    while block_ms > 0:
        started = time.perf_counter_ns()
        next(calls)()
        taken_ms = (time.perf_counter_ns() - started) / 1e6
        block_ms -= taken_ms
        yield taken_ms


def _wait_until_idle() -> float:
    """Wait until the threads of this process use no CPU; returns how long they did, in seconds."""
    started, quiet, before = time.perf_counter(), 0, time.process_time()
    while quiet < 2 and time.perf_counter() - started < QUIET_LIMIT_S:
        time.sleep(QUIET_STEP_S)
        now = time.process_time()
        quiet = quiet + 1 if now - before < 0.1 * QUIET_STEP_S else 0
        before = now
    return max(0.0, time.perf_counter() - started - 2 * QUIET_STEP_S)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _answer(answers: IO[str], content: Mapping[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "held_out" in given:
        hold_out(given)
    else:
        main(given)
