"""The policy: what is done about every kind of failure. All of it is decided in the tables below, and nowhere else.

A failure is of a child (classify.py: `crash`, `timeout`, ...), of the model (a FreezeError's kind: `capture`, `build`, ...), of a
candidate that a judge finds damaged (`damage`), or of the cluster (Ray's exceptions, by their names). docs/operate.md has the same
as a table for people; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.failures.classify import GPU_MEMORY, NODE_MEMORY, classify
from pipeline.records.failure import Failure

Kept = Literal["never", "memory", "quarantine", "key"]
"""What the next campaign does, see Decision; the less it takes to try again, the further to the front."""

MOST_ATTEMPTS = 5
"""Of one build or judge in one campaign, whatever befalls it."""

MOST_STARTS = 3
"""Of campaigns, in which a recipe is tried that the circumstances keep from being built, where others were judged without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What is done about one kind of failure.

    Attributes:
        attempts: in one campaign, the first among them; 1 means that it is final.
        elsewhere: the next attempt is on another node, where another serves the class.
        more_memory: the next attempt has more memory kept free for it.
        later: the next attempt comes after what else waits.
        rebuild: what is damaged or gone is built again before the next attempt.
        kept: what the next campaign does. `never`: it tries again. `key`: it takes the failure over until the key changes.
            `memory`: it does so until more memory may be used, too. `quarantine`: until a person lifts it, too.
    """

    attempts: int = 1
    elsewhere: bool = False
    more_memory: bool = False
    later: bool = False
    rebuild: bool = False
    kept: Kept = "never"


FINAL = Decision(kept="key")

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
    # The model, or what lies under it: a person is to look at it.
    "crash": Decision(attempts=2, elsewhere=True, kept="quarantine"),
    "memory": Decision(kept="memory"),
    # The circumstances: another time it may go well.
    "timeout": Decision(),
    "error": Decision(),
    "disk": Decision(attempts=2, elsewhere=True, later=True),
    "damage": Decision(attempts=2, rebuild=True),
    "infrastructure": Decision(attempts=3, elsewhere=True, later=True),
    # The cluster. The outcome is `failed: infrastructure` in the end, but for `node-memory`, which is `failed: memory`.
    "node": Decision(attempts=3, elsewhere=True),
    "worker": Decision(attempts=3, elsewhere=True),
    "node-memory": Decision(attempts=2, more_memory=True),
    "object": Decision(attempts=3, elsewhere=True),
    "set-up": Decision(attempts=2, elsewhere=True, later=True),
    "task": Decision(attempts=2, elsewhere=True),
    "cancelled": Decision(attempts=2),
}
"""By kind of failure."""

BY_CODE: Mapping[str, Decision] = {
    # What could not be had from elsewhere.
    "CP-FETCH": Decision(),
    "CP-FETCH-DIGEST": Decision(),
    "CP-REGISTRY": Decision(),
    # How a worker is set up.
    "CP-OBJDUMP": Decision(),
    "CP-ENVIRONMENT": Decision(),
    # The machine had no more, though the entry set no limit, or a larger one.
    NODE_MEMORY: Decision(attempts=2, more_memory=True, kept="memory"),
    GPU_MEMORY: Decision(attempts=2, elsewhere=True, later=True),
}
"""By code, where it says more than the kind."""

RAY: Mapping[str, str] = {
    "NodeDiedError": "node",
    "LocalRayletDiedError": "node",
    "RayActorError": "node",
    "WorkerCrashedError": "worker",
    "OutOfMemoryError": "node-memory",
    "OutOfDiskError": "disk",
    "ObjectLostError": "object",
    "ObjectStoreFullError": "object",
    "RuntimeEnvSetupError": "set-up",
    "TaskCancelledError": "cancelled",
    "TaskUnschedulableError": "node",  # tasks are bound to their nodes: it is gone
    "RayTaskError": "task",
}
"""Ray's exceptions, by name, and the kinds of failure that they are; a subclass is what its base is, any other `infrastructure`."""

LIFT = "--lift-quarantine"


def decide(kind: str, code: str | None = None) -> Decision:
    """What is done about a failure; of a kind that no table knows it is final, and tried again by the next campaign."""
    return BY_CODE.get(code or "") or POLICY.get(kind, Decision())


def retry_rank(failure: Failure) -> int:
    """Return a sort key for failures: the smaller, the sooner a next campaign retries."""
    return get_args(Kept).index(decide(failure.kind, failure.code).kept)


def kind_of_ray(error: BaseException, cause: BaseException | None = None) -> str:
    """The kind of failure that an exception of Ray's is.

    Args:
        error: what Ray raised.
        cause: of a task that raised: what it raised.
    """
    if cause is not None and (kind := classify(cause).kind) in ("disk", "memory"):
        return "node-memory" if kind == "memory" else kind
    return next((RAY[base.__name__] for base in type(error).__mro__ if base.__name__ in RAY), "infrastructure")


def attempts_left(before: Sequence[str], kind: str, code: str | None = None) -> int:
    """How often a task may still be tried.

    Args:
        before: the kinds of all its failures in this campaign, in order, the last one included.
        kind, code: of the last one.
    """
    return max(0, min(decide(kind, code).attempts - before.count(kind), MOST_ATTEMPTS - len(before)))


def memory_for_next(asked_bytes: int, used_bytes: int) -> int:
    """How much memory to keep free for another attempt: twice what was kept for the last, or what it used."""
    return 2 * max(asked_bytes, used_bytes)


def is_kept(failure: Failure | None, *, memory_bytes: int | None = None, lifted: bool = False) -> bool:
    """Whether a campaign takes over a result of an earlier one with the same key.

    Args:
        failure: of the build or outcome; one without a failure is kept.
        memory_bytes: memory that it may use now; None if unknown.
        lifted: whether --lift-quarantine was given.
    """
    if failure is None:
        return True
    match decide(failure.kind, failure.code).kept:
        case "never":
            return False
        case "quarantine":
            return not lifted
        case "memory":
            return failure.tried_bytes is not None and memory_bytes is not None and memory_bytes <= failure.tried_bytes
        case _:
            return True


def is_missed(failure: Failure, *, num_starts: int, memory_bytes: int | None = None, lifted: bool = False) -> bool:
    """Whether a campaign builds a recipe again whose earlier failure left an outcome without it.

    As `is_kept`, but circumstances (`kept="never"`) get at most MOST_STARTS campaign starts.

    Args:
        failure, memory_bytes, lifted: as in `is_kept`.
        num_starts: campaign starts in which the build failed.
    """
    if decide(failure.kind, failure.code).kept == "never" and num_starts >= MOST_STARTS:
        return lifted
    return not is_kept(failure, memory_bytes=memory_bytes, lifted=lifted)


def final_sentence(kind: str, code: str | None, num_attempts: int) -> str:
    """What is added to the message of a failure that is final: how often it was tried, and what the next campaign does."""
    words = [f"tried {num_attempts} times"] if num_attempts > 1 else []
    if decide(kind, code).kept == "quarantine":
        words.append(f"quarantined: tried again when the model, its recipe or the toolchain changes, or with {LIFT}")
    if decide(kind, code).rebuild:
        words.append("the same command builds it again")
    return "; ".join(words)
