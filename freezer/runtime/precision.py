"""Full precision, whatever this process has set: of what is built, of eager in a judge, and on a GPU of every call that is served.

Inductor packs weights for bfloat16 where a process allows less, and the payload would compute so wherever it is served; an eager
model that computes so has an error beside which any drift looks small.

On a GPU torch asks at every call whether it may multiply float32 in TF32, and sum products of half precision in half precision; of
convolutions, and of such sums, it may by default. What was judged without must be served without, so calls turn both off and put
them back. The settings are the process's: while a call is under way, other threads compute in full precision too.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_OPERATIONS = ("matmul", "conv", "rnn")
_FULL, _UNSET, _FEWER_BITS = "ieee", "none", ("tf32", "bf16")


_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")

_Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions, and what to call them with, the last first."""

_silenced: set[Any] = set()


@contextlib.contextmanager
def plain_precision(device: torch.device | None = None) -> Iterator[None]:
    """Without what `torch.set_float32_matmul_precision` and `torch.backends.mkldnn.*.fp32_precision` allow in this process.

    Args:
        device: that is computed on; of a GPU, without what it may do, too.
    """
    with contextlib.ExitStack() as stack:
        if device is not None and device.type == "cuda":
            stack.enter_context(full_on_gpu())
        for operation in _OPERATIONS:
            _full(operation, stack)
        before = torch.get_float32_matmul_precision()
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        yield


def _full(operation: str, stack: contextlib.ExitStack) -> None:
    """Let oneDNN compute an operation in full precision, until the stack is unwound."""
    before = torch._C._get_fp32_precision_getter("mkldnn", operation)
    if before not in _FEWER_BITS:
        return
    torch._C._set_fp32_precision_setter("mkldnn", operation, _FULL)

    def put_back() -> None:
        torch._C._set_fp32_precision_setter("mkldnn", operation, _UNSET)
        if torch._C._get_fp32_precision_getter("mkldnn", operation) != before:  # it was set here, and not for all operations
            torch._C._set_fp32_precision_setter("mkldnn", operation, before)

    stack.callback(put_back)


class _FullOnGpu:
    """What `full_on_gpu` gives: one for all threads. On the path of every call, where a class is quicker than a generator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._undo: _Undo = []
        """What puts back what the first block found."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_under_way:
                _without_tf32(self._undo)
                _without_reduced_sums(self._undo)
            self._num_under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_under_way -= 1
            while not self._num_under_way and self._undo:
                function, args = self._undo.pop()
                function(*args)


_FULL_ON_GPU = _FullOnGpu()


def full_on_gpu() -> contextlib.AbstractContextManager[None]:
    """Without TF32 and without sums in half precision on GPUs; put back when the last of all threads' blocks ends."""
    return _FULL_ON_GPU


def settings_on_gpu() -> dict[str, Any]:
    """What this process allows on GPUs now: the precision of float32 for each kind of operation, and sums in half precision."""
    found: dict[str, Any] = {operation: torch._C._get_fp32_precision_getter("cuda", operation) for operation in _OPERATIONS}
    return {**found, **{name: _sums(name) for name in _REDUCED}}


def _without_tf32(undo: _Undo) -> None:
    """Turn TF32 off; what puts it back is added to `undo`.

    torch has two interfaces to one setting, and the older raises where the newer alone has changed it. So the older is used where
    it answers, and the newer only for what is left.
    """
    allowed = _tf32(*_OPERATIONS)
    if not allowed:
        return
    if allowed != ["matmul"]:
        before = _older(torch._C._get_cudnn_allow_tf32)
        if before is not None:
            _older(torch._C._set_cudnn_allow_tf32, False)
            undo.append((_older, (torch._C._set_cudnn_allow_tf32, before)))
    if "matmul" in allowed:
        named = _older(torch.get_float32_matmul_precision)
        if named is not None and named != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.append((torch.set_float32_matmul_precision, (named,)))
    for operation in _tf32(*allowed):
        torch._C._set_fp32_precision_setter("cuda", operation, _FULL)
        undo.append((torch._C._set_fp32_precision_setter, ("cuda", operation, "tf32")))


def _tf32(*operations: str) -> list[str]:
    return [operation for operation in operations if torch._C._get_fp32_precision_getter("cuda", operation) == "tf32"]


def _older(function: Any, *args: Any) -> Any:
    """What a function of the older interface gives; None where it raises since the newer one was used."""
    with contextlib.nullcontext() if function in _silenced else warnings.catch_warnings():
        if function not in _silenced:
            warnings.simplefilter("ignore")  # it warns of itself, once a process
            _silenced.add(function)
        try:
            return function(*args)
        except RuntimeError:
            return None


def _sums(name: str) -> Any:
    """Whether sums in half precision are allowed: a bool, or of newer torch a pair with whether sums may be split."""
    return getattr(torch._C, f"_get_cublas_{name}")()


def _without_reduced_sums(undo: _Undo) -> None:
    for name in _REDUCED:
        before = _sums(name)
        allowed, *split = before if isinstance(before, tuple) else (before,)
        if allowed:
            put = getattr(torch._C, f"_set_cublas_{name}")
            put(False, *split)
            undo.append((put, (allowed, *split)))
