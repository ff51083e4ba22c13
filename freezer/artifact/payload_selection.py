"""Select payloads by the threads of the process and the sizes of a call. Imports no torch.

Weights are packed for one thread count and one shape. An artifact may have a set of payloads for
each of several thread counts; a set may have payloads for single points besides the one for all
sizes. The set is selected at load, the payload at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from freezer.artifact.manifest import Payload


def thread_counts_of(payloads: Iterable[Payload]) -> tuple[int, ...]:
    """Thread counts that payloads are made for, ascending; payloads for any count do not appear."""
    counts = {payload.num_threads for payload in payloads}
    return tuple(sorted(count for count in counts if count is not None))


def payloads_for_threads(
    payloads: Iterable[Payload],
    num_threads: int,
) -> tuple[Payload, ...]:
    """Payloads for exactly this thread count or for any, most specific first."""
    return tuple(payload for payload in payloads if payload.num_threads in (None, num_threads))


def payloads_within(
    payloads: Iterable[Payload],
    budget: int,
) -> tuple[Payload, ...]:
    """Payloads for a process that may use `budget` threads; empty if all need more.

    Selects the largest thread count within the budget: fewer threads are slow, more would wait for
    each other. Payloads for any count serve alone only where none is made for a count.
    """
    candidates = tuple(payloads)
    counts = thread_counts_of(candidates)
    if not counts:
        return payloads_for_threads(candidates, budget)
    fitting = [count for count in counts if count <= budget]
    return payloads_for_threads(candidates, max(fitting)) if fitting else ()


def is_specialized(
    payload: Payload,
    others: Iterable[Payload],
) -> bool:
    """Whether another payload of the same thread count accepts the single sizes of this one too."""
    point = {dim.name: dim.min for dim in payload.dims}
    return is_exact(payload) and any(
        other.num_threads == payload.num_threads and not is_exact(other) and other.accepts(point)
        for other in others
    )


def without_specialized(payloads: Iterable[Payload]) -> tuple[Payload, ...]:
    """Drop the payloads for which `is_specialized` holds."""
    candidates = tuple(payloads)
    return tuple(item for item in candidates if not is_specialized(item, candidates))


def is_exact(payload: Payload) -> bool:
    """Whether a payload accepts only one size of every dim."""
    return all(dim.min == dim.max for dim in payload.dims)


def payload_at(
    payloads: Iterable[Payload],
    point: Mapping[str, int],
) -> Payload | None:
    """The most specific payload that accepts these sizes, which is the first; None if there is
    none.
    """
    return next((payload for payload in payloads if payload.accepts(point)), None)
