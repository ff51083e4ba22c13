"""Failures: classify exceptions, and decide what is retried: the tables here do, nothing else.

A failure comes from a child (`crash`, `timeout`, ...), from the model (the kind of a FreezeError:
`capture`, `build`, ...), from a judge that finds the machine busy (`unstable`, or `noise` if noise
is accepted), or from the cluster (Ray's exceptions, by name). docs/guides/operate.md shows the
table of retries; a test compares the two.

May import: pipeline.records.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from freezer.codec import frozen
from freezer.errors import (
    ColdpressError,
    FreezeError,
    InfrastructureError,
    IntegrityError,
    StoreError,
    UsageError,
)
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
    """Signs of one cause: errno, class names, or text of torch, compilers and the kernel."""

    kind: str
    code: str
    errnos: tuple[int, ...]
    text: str
    class_names: tuple[str, ...] = ()

    def fits(self, error: BaseException) -> bool:
        if isinstance(error, OSError) and error.errno in self.errnos:
            return True
        if any(base.__name__ in self.class_names for base in type(error).__mro__):
            return True
        words = [*map(os.strerror, self.errnos), self.text]
        return re.search("|".join(words), _text(error)) is not None


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
"""Causes outside the model, the most specific first; the last: no process, thread or file left."""


def coded_failure(kind: str, message: str) -> Failure:
    """Return the failure of a kind that no exception represents."""
    return Failure(kind=kind, code=CODES[kind], message=message)


def classify(error: BaseException) -> Failure:
    """Return the failure that an exception causes."""
    message = _message(error)
    for symptom in _SYMPTOMS:
        if any(symptom.fits(one) for one in _chain(error)):
            return Failure(kind=symptom.kind, code=symptom.code, message=message)
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


Kept = Literal["never", "limit", "memory", "quarantine", "key"]
"""What the next campaign does, see Decision; in order of how soon it retries."""

MOST_ATTEMPTS = 5
"""Limit for one build or judge in one campaign, over all kinds of failure."""

MOST_STARTS = 3
"""Limit of campaign starts that retry a recipe which circumstances prevented, when others were
judged without it.
"""

TIMEOUT_STARTS = 2
"""Campaign starts that exceed one time limit before the next ones keep that failure."""


@frozen
class Decision:
    """What happens after one kind of failure.

    Attributes:
        attempts: number of attempts in one campaign; 1 means that the first failure is final.
        elsewhere: retry on another node, if another serves the class.
        more_memory: reserve more memory for the retry.
        later: retry after the other waiting tasks.
        kept: what the next campaign does. `never`: it retries. `key`: it takes the failure over
            until the key changes. `memory`: or until more memory may be used. `quarantine`: or
            until a person lifts it. `limit`: as `never` until TIMEOUT_STARTS, then as `quarantine`,
            or until more time is allowed.
    """

    attempts: int = 1
    elsewhere: bool = False
    more_memory: bool = False
    later: bool = False
    kept: Kept = "never"


NEXT_TIME = Decision()
"""Final in this campaign; the next one tries again."""

FINAL = Decision(kept="key")
ELSEWHERE = Decision(attempts=3, elsewhere=True)
LATER = Decision(attempts=3, elsewhere=True, later=True)
TWICE_LATER = Decision(attempts=2, elsewhere=True, later=True)

POLICY: Mapping[str, Decision] = {
    # The model: it would fail again.
    "source": FINAL,
    "spec": FINAL,
    "capture": FINAL,
    "build": FINAL,
    "isa_leak": FINAL,
    "judge": FINAL,
    "freeze": FINAL,
    "output": FINAL,
    "processes": FINAL,
    # The model, or the libraries below it: a person should look at it.
    "crash": Decision(attempts=2, elsewhere=True, kept="quarantine"),
    "memory": Decision(kept="memory"),
    # The model, most likely: another attempt would take as long again.
    "timeout": Decision(kept="limit"),
    # The circumstances: a retry may succeed.
    "error": NEXT_TIME,
    "disk": TWICE_LATER,
    "infrastructure": LATER,
    "unstable": LATER,
    "noise": NEXT_TIME,  # with --accept-noise, which another attempt needs no more than this one
    # The cluster. The final outcome is `failed: infrastructure`; of `node-memory`, `failed:
    # memory`.
    "node": ELSEWHERE,
    "worker": ELSEWHERE,
    "node-memory": Decision(attempts=2, more_memory=True),
    "task": Decision(attempts=2, elsewhere=True),
}
"""By kind of failure."""

BY_CODE: Mapping[str, Decision] = {
    # A damaged candidate was removed from the store.
    IntegrityError.code: NEXT_TIME,
    # Of earlier releases: a build for a lesser class than its machine's.
    "CP-DEVICE-CLASS": NEXT_TIME,
    # Something could not be fetched.
    "CP-FETCH": NEXT_TIME,
    "CP-FETCH-DIGEST": NEXT_TIME,
    "CP-REGISTRY": NEXT_TIME,
    # The setup of a worker.
    "CP-OBJDUMP": NEXT_TIME,
    "CP-ENVIRONMENT": NEXT_TIME,
    # The machine ran out of memory, below the limit of the entry.
    NODE_MEMORY: Decision(attempts=2, more_memory=True, kept="memory"),
    GPU_MEMORY: TWICE_LATER,
}
"""By code, where that is more specific than the kind."""

RAY: Mapping[str, str] = {
    "NodeDiedError": "node",
    "LocalRayletDiedError": "node",
    "WorkerCrashedError": "worker",
    "OutOfMemoryError": "node-memory",
    "OutOfDiskError": "disk",
    "TaskUnschedulableError": "node",  # tasks are bound to their nodes
    "RayTaskError": "task",
}
"""Kinds of failure by the names of Ray's exceptions and of their bases."""

LIFT = "--lift-quarantine"


def decide(kind: str, code: str | None = None) -> Decision:
    """Return what happens after a failure; the next campaign retries one of an unknown kind."""
    return BY_CODE.get(code or "") or POLICY.get(kind, NEXT_TIME)


def kept_after(failure: Failure) -> Kept:
    """Return what the next campaign does after a final failure."""
    return decide(failure.kind, failure.code).kept


def retry_rank(failure: Failure) -> int:
    """Return a sort key for failures: the smaller, the sooner a next campaign retries."""
    return get_args(Kept).index(kept_after(failure))


def kind_of_ray(error: BaseException, cause: BaseException | None = None) -> str:
    """Return the kind of failure of one of Ray's exceptions.

    Args:
        error: exception that Ray raised.
        cause: exception that the task raised, if it did.
    """
    if cause is not None and (kind := classify(cause).kind) in ("disk", "memory"):
        return "node-memory" if kind == "memory" else kind
    bases = (base.__name__ for base in type(error).__mro__)
    return next((RAY[name] for name in bases if name in RAY), "infrastructure")


def attempts_left(before: Sequence[str], kind: str, code: str | None) -> int:
    """Return how many attempts a task has left.

    Args:
        before: kinds of all its failures in this campaign, including the last one.
        kind, code: of the last one.
    """
    left = decide(kind, code).attempts - before.count(kind)
    return max(0, min(left, MOST_ATTEMPTS - len(before)))


def is_kept(
    failure: Failure | None,
    *,
    memory_bytes: int | None,
    timeout_s: float,
    lifted: bool,
    most_starts: int | None = None,
) -> bool:
    """Whether a campaign takes over a result of an earlier one with the same key.

    Args:
        failure: of the build or outcome; one without a failure is kept.
        memory_bytes: memory that it may use now; None if unknown.
        timeout_s: time that it may take now.
        lifted: whether --lift-quarantine was given.
        most_starts: number of campaign starts from which a failure by circumstances is kept too.
    """
    if failure is None:
        return True
    match kept_after(failure):
        case "never":
            return most_starts is not None and failure.starts >= most_starts and not lifted
        case "limit":
            is_longer = failure.tried_s is None or timeout_s > failure.tried_s
            return failure.starts >= TIMEOUT_STARTS and not is_longer and not lifted
        case "quarantine":
            return not lifted
        case "memory":
            return (
                failure.tried_bytes is not None
                and memory_bytes is not None
                and memory_bytes <= failure.tried_bytes
            )
        case _:
            return True


def final_sentence(kind: str, code: str | None, num_attempts: int) -> str:
    """Return what to add to a final message: attempts, and what the next campaign does."""
    words = [f"tried {num_attempts} times"] if num_attempts > 1 else []
    kept = decide(kind, code).kept
    if kept in ("limit", "quarantine"):
        when = f" after {TIMEOUT_STARTS} campaigns" if kept == "limit" else ""
        words.append(
            f"quarantined{when}: tried again when the model, its recipe, the toolchain or the limit"
            f" changes, or with {LIFT}"
        )
    if kind in ("unstable", "noise"):
        remedy = ", or with --accept-noise" if kind == "unstable" else ""
        words.append(f"the next campaign times it again; run it on quieter nodes{remedy}")
    if code == IntegrityError.code:
        words.append("the same command builds it again")
    return "; ".join(words)
