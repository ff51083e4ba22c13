"""Classify an exception as a Failure: its kind, its code and a sentence for people."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from freezer.errors import ColdpressError, FreezeError, InfrastructureError, StoreError, UsageError
from freezer.freezing.diagnostics import NOT_WRITTEN
from pipeline.records import Failure

CODES = {
    "timeout": "CP-TIMEOUT",
    "memory": "CP-MEMORY",
    "crash": "CP-CRASH",
    "output": "CP-LOG-SIZE",
    "processes": "CP-PROCESSES",
    "disk": "CP-DISK",
    "infrastructure": "CP-INFRASTRUCTURE",
}
"""Codes of failures that no exception class of freezer.errors represents."""

NODE_MEMORY = "CP-MEMORY-NODE"
"""The machine ran out of memory, below the limit of the item."""

GPU_MEMORY = "CP-MEMORY-GPU"
"""A GPU ran out of memory; limits of the machine's memory do not apply."""


@dataclass(frozen=True, slots=True)
class _Symptom:
    """Signs of one cause: errno, class names, or text that torch, compilers and the kernel
    print.
    """

    kind: str
    code: str
    errnos: tuple[int, ...]
    text: str
    class_names: tuple[str, ...] = ()

    def fits(self, error: BaseException) -> bool:
        words = "|".join([*(re.escape(os.strerror(number)) for number in self.errnos), self.text])
        return (
            (isinstance(error, OSError) and error.errno in self.errnos)
            or any(base.__name__ in self.class_names for base in type(error).__mro__)
            or re.search(words, _text(error)) is not None
        )


_SYMPTOMS = (
    _Symptom("disk", CODES["disk"], (errno.ENOSPC, errno.EDQUOT, errno.EIO), NOT_WRITTEN),
    _Symptom(
        "memory",
        GPU_MEMORY,
        (),
        r"CUDA out of memory|CUDA error: out of"
        r" memory|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED",
        ("OutOfMemoryError",),
    ),
    _Symptom(
        "memory",
        CODES["memory"],
        (errno.ENOMEM,),
        r"DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc|[Cc]annot allocate memory|"
        r"out of memory allocating|virtual memory exhausted|Killed signal terminated program",
        ("MemoryError",),
    ),
    _Symptom(
        "infrastructure",
        CODES["infrastructure"],
        (errno.EAGAIN, errno.ENFILE),
        r"can't start new thread|can't fork",
    ),
)
"""Causes outside the model, the most specific first.

The last one: no process, thread or open file is left on the machine.
"""


def coded_failure(kind: str, message: str) -> Failure:
    """Return the failure of a kind that no exception represents."""
    return Failure(kind=kind, code=CODES[kind], message=message)


def classify(error: BaseException) -> Failure:
    """Return the failure that an exception causes."""
    message = _message(error)
    for symptom in _SYMPTOMS:
        if any(symptom.fits(one) for one in _chain(error)):
            return Failure(
                kind=symptom.kind,
                code=symptom.code,
                message=message,
            )
    code = error.code if isinstance(error, ColdpressError) else ColdpressError.code
    kind = "spec" if isinstance(error, UsageError) else "error"
    if isinstance(error, FreezeError):
        kind = error.kind
    elif isinstance(error, InfrastructureError | StoreError):
        kind = "infrastructure"
    return Failure(kind=kind, code=code, message=message)


def _message(error: BaseException) -> str:
    """Return an exception as one sentence."""
    if isinstance(error, ColdpressError):
        return str(error)
    lines = _text(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1]}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's exception whose __str__ raises
        return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes, and the members of groups. A chain may contain a cycle."""
    seen = set()
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
