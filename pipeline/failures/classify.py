"""How a child ended: one typed End for every way, with its code and a sentence for people."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from freezer.errors import ColdpressError, FreezeError, InfrastructureError, StoreError, UsageError
from freezer.freezing.diagnostics.remedies import NOT_WRITTEN

CODES = {
    "timeout": "CP-TIMEOUT",
    "memory": "CP-MEMORY",
    "crash": "CP-CRASH",
    "output": "CP-LOG-SIZE",
    "processes": "CP-PROCESSES",
    "disk": "CP-DISK",
    "infrastructure": "CP-INFRASTRUCTURE",
}
"""Codes of failures of the circumstances, which no exception of ours stands for."""

NODE_MEMORY = "CP-MEMORY-NODE"
"""The code of a failure of memory where the machine had no more, whatever the item was allowed."""

GPU_MEMORY = "CP-MEMORY-GPU"
"""The code of a failure of memory where it was a GPU's; that has nothing to do with limits of the machine's memory."""

EndKind = Literal["ok", "error", "timeout", "memory", "crash", "output", "processes", "disk", "infrastructure"]

_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc|[Cc]annot allocate memory|"
    r"out of memory allocating|virtual memory exhausted|Killed signal terminated program"
)
"""What torch, C++ and gcc say for want of memory."""

_OUT_OF_GPU_MEMORY = re.compile(r"CUDA out of memory|CUDA error: out of memory|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED")
"""What torch and the libraries of CUDA say."""

_NO_PROCESS = (errno.EAGAIN, errno.ENFILE)
_OF_THE_MACHINE = re.compile(
    "|".join([*(re.escape(os.strerror(number)) for number in _NO_PROCESS), r"can't start new thread", r"can't fork"])
)
"""What Python, compilers and the kernel say where no process, thread or open file is left to be had, whoever has them all."""

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_OF_THE_DISK = re.compile("|".join([*(re.escape(os.strerror(number)) for number in _DISK), NOT_WRITTEN]))
"""What compilers, torch and libraries in Rust say of a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a child ended.

    Attributes:
        kind: `ok`; `error`: it raised; the others: it was stopped, or died.
        value: what the function returned.
        failure: the type of the failed outcome: a FreezeError's kind, or `kind` itself.
        code: of the failure, in docs/errors.md.
        message: one sentence for people.
        log_tail: the last lines that the child printed.
        peak_bytes: the largest resident memory of the child and its own children that was seen.
        tried_bytes: of a failure of memory, as much as was not enough.
        wall_s: from the moment it had started to its end.
    """

    kind: EndKind
    value: Any = None
    failure: str | None = None
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    peak_bytes: int = 0
    tried_bytes: int | None = None
    wall_s: float = 0.0


def failure_of(error: BaseException) -> str:
    """The type of the failed outcome that an exception makes."""
    if _is_of_the_disk(error):
        return "disk"
    if _is_of_gpu_memory(error) or _is_of_memory(error):
        return "memory"
    if _is_of_the_machine(error):
        return "infrastructure"
    if isinstance(error, FreezeError):
        return error.kind
    if isinstance(error, InfrastructureError | StoreError):
        return "infrastructure"
    return "spec" if isinstance(error, UsageError) else "error"


def code_of(error: BaseException) -> str:
    """The code of the failed outcome that an exception makes."""
    if isinstance(error, ColdpressError) and failure_of(error) not in ("disk", "memory") and not _is_of_the_machine(error):
        return error.code
    if failure_of(error) == "memory" and _is_of_gpu_memory(error):
        return GPU_MEMORY
    return CODES.get(failure_of(error), ColdpressError.code)


def message_of(error: BaseException) -> str:
    """An exception in one sentence."""
    if isinstance(error, ColdpressError):
        return str(error)
    lines = _text(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1]}"


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether a full or broken disk is behind an exception; compilers tell of it in their output alone."""
    return any((isinstance(one, OSError) and one.errno in _DISK) or _OF_THE_DISK.search(_text(one)) for one in _chain(error))


def _is_of_gpu_memory(error: BaseException) -> bool:
    """Whether a want of a GPU's memory is behind an exception."""
    return any(type(one).__name__ == "OutOfMemoryError" or _OUT_OF_GPU_MEMORY.search(_text(one)) for one in _chain(error))


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether a want of processes, threads or open files of the whole machine, or container, is behind an exception."""
    return any(
        (isinstance(one, OSError) and one.errno in _NO_PROCESS) or _OF_THE_MACHINE.search(_text(one)) for one in _chain(error)
    )


def _is_of_memory(error: BaseException) -> bool:
    """Whether a want of memory is behind an exception; torch and compilers tell of it in their messages alone."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or _OUT_OF_MEMORY.search(_text(one)) is not None
        for one in _chain(error)
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's whose text cannot be made
        return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from, and those of a group; a chain may be a ring."""
    seen: set[int] = set()
    further = [error]
    while further:
        error = further.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        further.append(error.__cause__ or error.__context__)
        if isinstance(error, BaseExceptionGroup):
            further.extend(error.exceptions)
