"""Compute in full precision, regardless of this process's settings: builds, eager in a judge, and
every call on a GPU.

If a process allows lower precision, Inductor packs weights in bfloat16, and the eager model has an
error that hides drift.

On a GPU, torch checks in every call whether float32 may be multiplied in TF32, and half-precision
products summed in half precision; by default it allows TF32 in convolutions, and such sums.
Artifacts are judged without both, so calls turn both off and restore them; those of the recipe for
TF32 turn it on. The settings belong to the process: during a call, other threads compute in its
precision too, and during calls of both kinds all compute in full precision.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

_T = TypeVar("_T")
_OPERATIONS = ("matmul", "conv", "rnn")
_FULL, _UNSET, _FEWER_BITS = "ieee", "none", ("tf32", "bf16")


_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")

_silenced: set[object] = set()


@contextlib.contextmanager
def plain_precision(device: torch.device | None = None) -> Iterator[None]:
    """Ignore `torch.set_float32_matmul_precision` and `torch.backends.mkldnn.*.fp32_precision`; on
    a GPU also TF32.
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


def _full(
    operation: str,
    stack: contextlib.ExitStack,
) -> None:
    """Let oneDNN compute an operation in full precision until the stack is closed."""
    before = torch._C._get_fp32_precision_getter("mkldnn", operation)
    if before not in _FEWER_BITS:
        return
    torch._C._set_fp32_precision_setter("mkldnn", operation, _FULL)

    def put_back() -> None:
        torch._C._set_fp32_precision_setter("mkldnn", operation, _UNSET)
        inherited = torch._C._get_fp32_precision_getter("mkldnn", operation)
        if inherited != before:  # it was set for this operation, not for all
            torch._C._set_fp32_precision_setter("mkldnn", operation, before)

    stack.callback(put_back)


class _Blocks:
    """The blocks under way in all threads, by thread and from the outermost on: whether they
    compute in TF32.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_thread: dict[int, list[bool]] = {}
        self._is_full = self._is_tf32 = False
        self._undo_full = contextlib.ExitStack()
        self._undo_tf32 = contextlib.ExitStack()

    def settle(self) -> None:
        """Set what the innermost blocks need: TF32 if all do."""
        innermost = [blocks[-1] for blocks in self.by_thread.values()]
        if innermost and not self._is_full:
            _without_tf32(self._undo_full)
            _without_reduced_sums(self._undo_full)
        tf32 = bool(innermost) and all(innermost)
        if tf32 and not self._is_tf32:
            _with_tf32(self._undo_tf32)
        elif not tf32:
            self._undo_tf32.close()
        if not innermost:
            self._undo_full.close()
        self._is_full, self._is_tf32 = bool(innermost), tf32


_BLOCKS = _Blocks()


class _OnGpu:
    """A class, since every call enters it and a generator is slower."""

    def __init__(self, *, tf32: bool) -> None:
        self._tf32 = tf32

    def __enter__(self) -> None:
        with _BLOCKS.lock:
            _BLOCKS.by_thread.setdefault(threading.get_ident(), []).append(self._tf32)
            _BLOCKS.settle()

    def __exit__(self, *_: object) -> None:
        with _BLOCKS.lock:
            mine = _BLOCKS.by_thread[threading.get_ident()]
            mine.pop()
            if not mine:
                del _BLOCKS.by_thread[threading.get_ident()]
            _BLOCKS.settle()


_FULL_ON_GPU, _TF32_ON_GPU = _OnGpu(tf32=False), _OnGpu(tf32=True)


def full_on_gpu() -> contextlib.AbstractContextManager[None]:
    """Turn off TF32 and half-precision sums on GPUs; restored when the last block of all threads
    ends.
    """
    return _FULL_ON_GPU


def tf32_on_gpu() -> contextlib.AbstractContextManager[None]:
    """The same with TF32, unless a block of another thread needs full precision."""
    return _TF32_ON_GPU


def _without_tf32(undo: contextlib.ExitStack) -> None:
    """Turn TF32 off, and add to `undo` how to restore it.

    torch has two interfaces to this setting, and the older one raises after the newer one changed
    it. So the older is used where it works, and the newer for the rest.
    """
    allowed = _tf32(*_OPERATIONS)
    if not allowed:
        return
    if allowed != ["matmul"]:
        before = _older(torch._C._get_cudnn_allow_tf32)
        if before is not None:
            _older(torch._C._set_cudnn_allow_tf32, False)
            undo.callback(_older, torch._C._set_cudnn_allow_tf32, before)
    if "matmul" in allowed:
        named = _older(torch.get_float32_matmul_precision)
        if named is not None and named != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.callback(torch.set_float32_matmul_precision, named)
    for operation in _tf32(*allowed):
        torch._C._set_fp32_precision_setter("cuda", operation, _FULL)
        undo.callback(torch._C._set_fp32_precision_setter, "cuda", operation, "tf32")


def _with_tf32(undo: contextlib.ExitStack) -> None:
    """Turn TF32 on where `_without_tf32` turned it off, and add to `undo` how to restore it."""
    if _older(torch.get_float32_matmul_precision) == "highest":
        torch.set_float32_matmul_precision("high")
        undo.callback(torch.set_float32_matmul_precision, "highest")
    if _older(torch._C._get_cudnn_allow_tf32) is False:
        _older(torch._C._set_cudnn_allow_tf32, True)
        undo.callback(_older, torch._C._set_cudnn_allow_tf32, False)
    allowed = _tf32(*_OPERATIONS)
    for operation in _OPERATIONS:
        if operation not in allowed:
            torch._C._set_fp32_precision_setter("cuda", operation, "tf32")
            undo.callback(torch._C._set_fp32_precision_setter, "cuda", operation, _FULL)


def _tf32(*operations: str) -> list[str]:
    return [
        operation
        for operation in operations
        if torch._C._get_fp32_precision_getter("cuda", operation) == "tf32"
    ]


def _older(
    function: Callable[..., _T],
    *args: object,
) -> _T | None:
    """Result of a function of the older interface; None if it raises because the newer one was
    used.
    """
    with contextlib.ExitStack() as stack:
        if function not in _silenced:  # deprecated; warns once per process
            _silenced.add(function)
            stack.enter_context(warnings.catch_warnings(action="ignore"))
        try:
            return function(*args)
        except RuntimeError:
            return None


def _without_reduced_sums(undo: contextlib.ExitStack) -> None:
    for name in _REDUCED:
        # A bool, or in newer torch a pair with whether sums may be split.
        before = getattr(torch._C, f"_get_cublas_{name}")()
        allowed, *split = before if isinstance(before, tuple) else (before,)
        if allowed:
            setter = getattr(torch._C, f"_set_cublas_{name}")
            setter(False, *split)
            undo.callback(setter, allowed, *split)


class _Known(threading.local):
    """Whether this thread has called `own_count`."""

    seen = False


_known = _Known()
_lock = threading.Lock()
_under_way: Counter[int] = Counter()
"""Number of running blocks by the count they set."""
_process_count: list[int] = []
"""The count that new threads inherited before the first running block; empty without blocks."""


def own_count() -> int:
    """Thread count of torch in this thread, not inherited from a block in another thread."""
    if not _known.seen:
        _known.seen = True
        with _lock:
            if _process_count:
                # In another thread: setting the count here would replace a count that this thread
                # has set itself.
                fixer = threading.Thread(
                    target=_fix_inherited,
                    name="coldpress-threads",
                    daemon=True,
                )
                fixer.start()
                fixer.join()
    return torch.get_num_threads()


def _fix_inherited() -> None:
    """Let threads that are new to torch inherit the process's count, not a block's."""
    if _under_way[torch.get_num_threads()]:
        torch.set_num_threads(_process_count[0])


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Run with a number of intra-op threads, and restore this thread's own."""
    before = own_count()
    if before == num_threads:
        yield
        return
    with _lock:
        if not _process_count:
            _process_count.append(before)
        _under_way[num_threads] += 1
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        with _lock:
            _under_way[num_threads] -= 1
            if not any(_under_way.values()):
                _process_count.clear()
            torch.set_num_threads(before)


@contextlib.contextmanager
def _default_context(device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def default_context(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Compute without the caller's autocast and default dtype, which would change the answers of
    payloads that torch runs.
    """
    plain = torch.get_default_dtype() is torch.float32
    if plain and not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return _default_context(device)
