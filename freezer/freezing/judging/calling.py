"""The calling protocol: ways in which serving code calls a model, each tried once, besides the
plain calls of the drift gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from freezer.freezing.drift import Extreme, copied
from freezer.freezing.models import NamedTensors
from freezer.runtime.tensors import addresses_of, cloned, leaves_of, same_bytes

NUM_CALLS = 16
"""Calls after which a model that should keep no state must answer as at first."""

Model = Callable[..., object]


def calling_problem(model: Model, first: Extreme, second: Extreme) -> str | None:
    """What a model answers wrong in one of the ways; None if nothing.

    Args:
        model: an open candidate that keeps no state.
        first, second: two sets of inputs of one size, with eager's answers.
    """
    for extreme, way, answers in _tried(model, first, second):
        problem = extreme.problem([answer.cpu() for answer in answers])
        if problem:
            return f"{way}: {problem}"
    return None


def _tried(
    model: Model, first: Extreme, second: Extreme
) -> Iterator[tuple[Extreme, str, list[Tensor]]]:
    """For each way, the inputs' eager answers, the way in words, and the model's answers."""

    def call(inputs: NamedTensors) -> list[Tensor]:
        return leaves_of(model(**inputs))

    buffers = cloned(first.inputs)
    kept = call(buffers)
    if not all(same_bytes(buffers[name], tensor) for name, tensor in first.inputs.items()):
        raise ValueError("a call writes into its inputs")
    call(second.inputs)
    yield first, "answers kept over the next call", copied(kept)
    own = addresses_of(buffers.values())
    for answer in kept:
        if not addresses_of([answer]) <= own:
            answer.zero_()
    yield first, "after its answers were changed", call(first.inputs)
    for name, buffer in buffers.items():
        buffer.copy_(second.inputs[name])
    yield second, "inputs in a buffer that was filled again", call(buffers)
    yield first, "inputs at another offset in memory", call(_moved(first.inputs))
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(call, first.inputs).result()
    yield first, "in another thread", answers
    with torch.autocast(first.subject.device.type, dtype=torch.bfloat16):
        answers = call(first.inputs)
    yield first, "under autocast", answers
    with torch.inference_mode():
        answers = call(first.inputs)
    yield first, "in inference mode", answers
    for _ in range(NUM_CALLS):
        answers = call(first.inputs)
    yield first, f"after {NUM_CALLS} calls", answers


def _moved(inputs: NamedTensors) -> dict[str, Tensor]:
    """The same inputs, each one element further in its memory."""
    moved = {}
    for name, tensor in inputs.items():
        room = tensor.new_empty(tensor.numel() + 1)
        moved[name] = room[1:].view(tensor.shape).copy_(tensor)
    return moved
