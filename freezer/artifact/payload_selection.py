"""Which payload serves: by the threads that a process may use, then by the sizes of a call. Imports no torch.

Packed weights are made for one thread count and one shape. So an artifact may hold a set of payloads for each of several thread
counts, and in a set one payload for each of several points beside the one for all sizes. A set is taken once, at load; a payload of
it is taken anew for every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from freezer.artifact.manifest import Payload


def counts_of(payloads: Iterable[Payload]) -> tuple[int, ...]:
    """The thread counts that payloads are laid out for, least first; payloads that fit any count do not add to it."""
    return tuple(sorted({payload.num_threads for payload in payloads if payload.num_threads is not None}))


def set_for(payloads: Iterable[Payload], num_threads: int) -> tuple[Payload, ...]:
    """The payloads that are laid out for just this thread count, or for any, in their order: the most special first."""
    return tuple(payload for payload in payloads if payload.num_threads in (None, num_threads))


def set_within(payloads: Iterable[Payload], budget: int) -> tuple[Payload, ...]:
    """The payloads that serve a process that may use so many threads, in their order; none where all are laid out for more.

    Those for just this count are taken, else those for the largest count below it: fewer threads than the process has are slower
    than it could be, more of them than it has would wait for each other.
    """
    held = tuple(payloads)
    below = [count for count in counts_of(held) if count <= budget]
    return set_for(held, max(below, default=budget))


def is_special(payload: Payload, others: Iterable[Payload]) -> bool:
    """Whether a payload is for single sizes that another of the same thread count serves too."""
    return is_exact(payload) and any(
        other is not payload
        and other.num_threads == payload.num_threads
        and not is_exact(other)
        and other.accepts({dim.name: dim.min for dim in payload.dims})
        for other in others
    )


def without_special(payloads: Iterable[Payload]) -> tuple[Payload, ...]:
    """The payloads without those for single sizes that another serves too."""
    held = tuple(payloads)
    return tuple(payload for payload in held if not is_special(payload, held))


def is_exact(payload: Payload) -> bool:
    """Whether a payload accepts one size of every dim."""
    return all(dim.min == dim.max for dim in payload.dims)


def serving(payloads: Iterable[Payload], point: Mapping[str, int]) -> Payload | None:
    """The first payload that accepts these sizes, which is the most special; None where none does."""
    return next((payload for payload in payloads if payload.accepts(point)), None)
