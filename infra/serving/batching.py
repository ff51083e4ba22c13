"""Join requests that wait for a model into one call, along a dim that all inputs and outputs have.

The contract names the dim in inputs; which dim of each output it is, the golden outputs show. A
model may still mix what is joined, such as by statistics over a batch: before it serves, the halves
of a golden input must give the same as the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from freezer.artifact import Manifest
from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.runtime.arrays import Array, widened
from freezer.spec import Dim, InputSpec

Arrays = Mapping[str, Array]
"""Arrays by name."""

Shapes = Mapping[str, Sequence[int | str | None]]
"""Shapes by name: sizes, names of dims, and None for sizes of which nothing is known."""

CLOSE, CLOSE_IN_16_BITS = 1e-3, 1e-2
"""Largest difference between a whole call and its halves, as a share of the largest value. Kernels
round differently by size; mixed requests differ by more.
"""


def output_shapes(manifest: Manifest, path: Path) -> Shapes:
    """The shape of each output, by the golden sets: a size that is the same in all of them is
    fixed, if they vary every dim; one that is always that of one dim is the dim's.

    Args:
        manifest: manifest of the artifact.
        path: its golden outputs.
    """
    points = [item.point for item in manifest.golden]
    varied = True
    for dim in manifest.inputs.dims:
        varied &= not dim.varies or len({point[dim.name] for point in points}) > 1
    shapes: dict[str, Sequence[int | str | None]] = {}
    with safe_open(path, framework="np") as file:
        for spec in manifest.outputs:
            stored = [file.get_slice(f"{i}/{spec.name}").get_shape() for i in range(len(points))]
            columns = list(zip(*stored, strict=True))[: spec.rank]  # complex128 has one more
            shapes[spec.name] = [_size(column, points, varied) for column in columns]
    return shapes


def _size(
    sizes: Sequence[int], points: Sequence[Mapping[str, int]], varied: bool
) -> int | str | None:
    """The size of an output's dim, from its size at every point."""
    if len(set(sizes)) == 1:
        return sizes[0] if varied else None
    same = []
    for name in points[0]:
        if [point[name] for point in points] == list(sizes):
            same.append(name)
    return same[0] if len(same) == 1 else None


@frozen
class Joint:
    """Where requests of a model are joined.

    Attributes:
        dim: the dim that grows.
        inputs, outputs: its position in the shape of each, by name.
    """

    dim: Dim
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@frozen
class GoldenCall:
    """Golden inputs, and the sizes of their dims."""

    point: Mapping[str, int]
    inputs: Arrays


def joint_of(
    spec: InputSpec,
    shapes: Shapes,
    golden: Sequence[GoldenCall],
    call: Callable[[Arrays], Arrays],
) -> Joint:
    """Where requests can be joined.

    Args:
        spec: inputs of the model.
        shapes: of its outputs.
        golden: golden inputs.
        call: calls the model.

    Raises:
        UsageError: nowhere.
    """
    problems = []
    for joint in _shared(spec, shapes):
        problem = _problem(joint, golden, call)
        if problem is None:
            return joint
        problems.append(f"{joint.dim.name}: {problem}")
    reasons = "; ".join(problems) or "no dim is in every input and output"
    raise UsageError(f"requests cannot be joined ({reasons}); omit --max-batch")


def _shared(spec: InputSpec, shapes: Shapes) -> list[Joint]:
    """The dims that every input and output has once, those first that come first in a shape."""
    found = []
    for dim in spec.dims:
        inputs = {item.name: item.shape for item in spec.tensors}
        every = [*inputs.values(), *shapes.values()]
        if all(list(shape).count(dim.name) == 1 for shape in every):
            found.append(
                Joint(
                    dim=dim,
                    inputs={name: list(shape).index(dim.name) for name, shape in inputs.items()},
                    outputs={name: list(shape).index(dim.name) for name, shape in shapes.items()},
                )
            )
    return sorted(found, key=lambda joint: min(joint.inputs.values(), default=0))


def _problem(
    joint: Joint, golden: Sequence[GoldenCall], call: Callable[[Arrays], Arrays]
) -> str | None:
    """Why requests cannot be joined there; None if they can."""
    dim = joint.dim
    for given in golden:
        first, size = dim.min, given.point[dim.name]
        if size - first not in dim.sizes:
            continue
        whole = call(given.inputs)
        halves = [
            call(parts_of(given.inputs, joint.inputs, start, stop))
            for start, stop in ((0, first), (first, size))
        ]
        for name, axis in joint.outputs.items():
            joined = np.concatenate([half[name] for half in halves], axis)
            if not _close(whole[name], joined):
                return f"output {name!r} of a joined request depends on the others"
        return None
    return f"no golden input is of two requests, {dim}"


def _close(whole: Any, joined: Any) -> bool:
    """Whether two outputs are the same but for rounding."""
    if tuple(whole.shape) != tuple(joined.shape) or whole.dtype != joined.dtype:
        return False
    a, b = widened(whole), widened(joined)
    if a.dtype.kind in "biu":
        return np.array_equal(a, b)
    share = CLOSE if whole.dtype.itemsize > 2 else CLOSE_IN_16_BITS
    finite = np.abs(a[np.isfinite(a)])
    largest = float(finite.max()) if finite.size else 0.0
    return np.allclose(a, b, rtol=0.0, atol=share * largest, equal_nan=True)


def parts_of(arrays: Arrays, axes: Mapping[str, int], start: int, stop: int) -> dict[str, Any]:
    """A range of every array along its axis, on the same memory."""
    return {
        name: arrays[name][(slice(None),) * axis + (slice(start, stop),)]
        for name, axis in axes.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A request that waits.

    Attributes:
        call: calls the model.
        joint: where it can be joined.
        inputs: of the request.
        size: along the dim.
        kind: equal for jobs that can be joined; None for one that cannot.
        answered: gets the outputs.
        arrived: time of `time.monotonic`.
    """

    call: Callable[[Arrays], Arrays]
    joint: Joint
    inputs: Arrays
    size: int
    kind: object
    answered: asyncio.Future[Arrays]
    arrived: float


class Batcher:
    """Calls a model for the requests that wait, many at a time.

    Args:
        worker: runs the calls, one after the other.
        max_size: largest sum of the sizes of joined requests.
        max_delay_s: time that a request waits for others while the model is free.
        observe: receives the number of requests of each call.
    """

    def __init__(
        self,
        worker: Executor,
        *,
        max_size: int,
        max_delay_s: float,
        observe: Callable[[int], None],
    ) -> None:
        self._worker, self._observe = worker, observe
        self._max_size, self._max_delay_s = max_size, max_delay_s
        self._jobs: list[Job] = []
        self._arrived = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def answer(
        self, call: Callable[[Arrays], Arrays], joint: Joint, inputs: Arrays
    ) -> Arrays:
        """The outputs of a request; raises what its call raises."""
        size, kind = _size_and_kind(joint, inputs)
        job = Job(
            call=call,
            joint=joint,
            inputs=inputs,
            size=size,
            kind=kind,
            answered=asyncio.get_running_loop().create_future(),
            arrived=time.monotonic(),
        )
        self._jobs.append(job)
        self._arrived.set()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await job.answered

    async def _run(self) -> None:
        """Answer jobs until none waits."""
        loop = asyncio.get_running_loop()
        while self._jobs:
            jobs = await self._next()
            self._jobs = [job for job in self._jobs if job not in jobs]
            self._observe(len(jobs))
            answers = await loop.run_in_executor(self._worker, _answers, jobs)
            for job, answer in zip(jobs, answers, strict=True):
                if job.answered.done():  # its client has left
                    continue
                if isinstance(answer, Exception):
                    job.answered.set_exception(answer)
                else:
                    job.answered.set_result(answer)

    async def _next(self) -> list[Job]:
        """The first job and those to join it with, when they are enough or it has waited."""
        first = self._jobs[0]
        deadline = first.arrived + self._max_delay_s
        while True:
            jobs = self._with(first)
            wait_s = deadline - time.monotonic()
            if first.kind is None or sum(job.size for job in jobs) >= self._most(first):
                return jobs
            if wait_s <= 0:
                return jobs
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), wait_s)

    def _with(self, first: Job) -> list[Job]:
        """The first job and the jobs to join it with, in order."""
        jobs, size = [first], first.size
        for job in self._jobs:
            fits = size + job.size <= self._most(first)
            if job is not first and first.kind is not None and job.kind == first.kind and fits:
                jobs.append(job)
                size += job.size
        return jobs

    def _most(self, job: Job) -> int:
        return min(self._max_size, job.joint.dim.max)


def _size_and_kind(joint: Joint, inputs: Arrays) -> tuple[int, object]:
    """The size of a request along the dim, and what else must be the same to join it; None if it
    cannot be joined, such as one that violates the contract.
    """
    sizes, kind = set(), []
    if set(inputs) != set(joint.inputs):
        return 0, None
    for name, axis in sorted(joint.inputs.items()):
        leaf = inputs[name]
        shape = tuple(getattr(leaf, "shape", ()))
        if len(shape) <= axis:
            return 0, None
        sizes.add(shape[axis])
        kind.append((name, str(leaf.dtype), shape[:axis], shape[axis + 1 :]))
    size = sizes.pop()
    if sizes or size not in joint.dim.sizes:
        return 0, None
    return size, (id(joint), *kind)


def _answers(jobs: Sequence[Job]) -> list[Arrays | Exception]:
    """The outputs of each job, or what its call raises."""
    outputs = _joined(jobs) if len(jobs) > 1 else None
    if outputs is None:
        return [_answer(job) for job in jobs]
    answers: list[Arrays | Exception] = []
    start = 0
    for job in jobs:
        answers.append(parts_of(outputs, job.joint.outputs, start, start + job.size))
        start += job.size
    return answers


def _joined(jobs: Sequence[Job]) -> Arrays | None:
    """The outputs of one call for all jobs; None where only their own calls say what is wrong."""
    joint = jobs[0].joint
    inputs = {}
    for name, axis in joint.inputs.items():
        inputs[name] = np.concatenate([job.inputs[name] for job in jobs], axis)
    size = sum(job.size for job in jobs)
    with suppress(Exception):  # of one job
        outputs = jobs[0].call(inputs)
        if all(outputs[name].shape[axis] == size for name, axis in joint.outputs.items()):
            return outputs
    return None


def _answer(job: Job) -> Arrays | Exception:
    try:
        return job.call(job.inputs)
    except Exception as error:  # a payload may raise anything
        return error
