"""Calls of the eager source model: failures as errors that name the model, and random numbers."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freezer.errors import JudgeError
from freezer.freezing.models.cloning import copied
from freezer.numerics import comparable, in_double, same_tensors, square_sum
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import same_bytes
from freezer.spec.inputs import InputSpec, bind

NUM_MORE_CALLS = 16
"""A fair coin falls the same way this often once in 65,536 times."""

ROUNDING = 1e-3
"""Relative to an output's size: smaller differences may come from the order of a sum."""

PROBLEM = (
    "eager's answers to the same inputs differ, but this one's are always the same: a value that was drawn or read during the "
    "capture (random, NumPy, the time, a global) was baked in; draw with torch (torch.rand), or make it an input"
)


class SourceCall:
    """A copy of the model to call. Leaves the caller's random stream unchanged."""

    def __init__(self, name: str, model: nn.Module) -> None:
        try:
            self._copy = copied(model).eval()
        except Exception as error:
            raise JudgeError(
                f"{name}: the model cannot be copied, which freezing requires: {described(error)}; move what cannot be copied out "
                "of the model, or define __deepcopy__"
            ) from error

    def __call__(self, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
        """The result of the copy."""
        with torch.random.fork_rng(devices=[]):
            return call_source(self._copy, spec, tensors)


def first_result(name: str, model: nn.Module, spec: InputSpec, item: InputSet) -> Any:
    """The result of the first call.

    Raises:
        JudgeError: the eager model fails (code CP-EAGER), or writes into its inputs (code CP-INPUT-WRITTEN).
    """
    given = item.cloned()
    before = {path: _version(tensor) for path, tensor in given.items()}
    source = SourceCall(name, model)
    try:
        result = source(spec, given)
    except Exception as error:
        raise JudgeError(f"{name}: the eager model fails on its inputs: {described(error)}", code="CP-EAGER") from error
    written = [
        path for path, tensor in given.items() if _version(tensor) != before[path] or not same_bytes(tensor, item.tensors[path])
    ]
    if written:
        paths, plural = ", ".join(repr(path) for path in written), "s" if len(written) > 1 else ""
        raise JudgeError(
            f"{name}: a call writes into its input{plural} {paths}, which would change the caller's tensors; start forward with a "
            f"copy (`x = x.clone()`), or return the new value",
            code="CP-INPUT-WRITTEN",
        )
    return result


def _version(tensor: Tensor) -> int:
    """A counter of writes into a tensor, including those that leave its values unchanged."""
    return 0 if tensor.is_inference() else tensor._version


def described(error: Exception) -> str:
    """The type and message of an error."""
    return f"{type(error).__name__}: {error}"


def call_source(model: Any, spec: InputSpec, tensors: Mapping[str, Tensor]) -> Any:
    """The source model's result, without gradients."""
    args, kwargs = bind(spec, tensors)
    with torch.no_grad():
        return model(*args, **kwargs)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch (on the CPU and on GPUs in use), Python, and NumPy if imported, which models and compilers
    draw from.
    """
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def positions() -> Any:
    """States of the generators of torch, Python and NumPy, which change when something is drawn. A model's own are not included."""
    numpy = sys.modules.get("numpy")
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state())
    return [state.tolist() for state in of_torch], random.getstate(), of_numpy


def same_each_time(ask_again: Callable[[], bool]) -> bool:
    """Whether a model always gives the same answer. If it draws random numbers, it is asked several times.

    Args:
        ask_again: repeats a call; returns whether the answer is the same as before.
    """
    before = positions()
    if not ask_again():
        return False
    return positions() == before or all(ask_again() for _ in range(NUM_MORE_CALLS))


def baked_in(
    eager: Sequence[Sequence[Tensor]], candidate: Sequence[Sequence[Tensor]], ask: Callable[[], list[Tensor]]
) -> str | None:
    """The problem of a candidate with a constant output where eager's is random; None if there is no such output.

    Args:
        eager, candidate: answers to one input set of equally many calls, at least two.
        ask: calls the candidate once more.
    """
    suspects = {
        index
        for index, (of_eager, mine) in enumerate(zip(zip(*eager, strict=True), zip(*candidate, strict=True), strict=True))
        if any(_apart(of_eager[0], other) for other in of_eager[1:]) and all(same_tensors(mine[0], other) for other in mine[1:])
    }
    for _ in range(NUM_MORE_CALLS):
        if not suspects:
            return None
        answer = ask()
        suspects = {index for index in suspects if same_tensors(candidate[0][index], answer[index])}
    return PROBLEM if suspects else None


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two answers differ by more than rounding."""
    if one.shape != other.shape or not comparable(one):
        return not torch.equal(one, other)
    a, b = in_double(one).nan_to_num(), in_double(other).nan_to_num()
    return square_sum(a - b) > ROUNDING**2 * square_sum(a)
