"""Choose the distinct inputs that a timed model is called with in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freezer.numerics import same_tensors
from freezer.runtime.input_set import InputSet, resize
from freezer.runtime.sample_generation import generate_at, needs_range
from freezer.spec.inputs import InputSpec

NUM_TIMED_INPUTS = 4
"""Distinct inputs that rotate while timing."""


def distinct_at(spec: InputSpec, sets: Sequence[InputSet], point: Mapping[str, int]) -> list[InputSet]:
    """Distinct input sets at a point: those that are there, then others cut or repeated to size, then generated ones."""
    own = [item for item in sets if dict(item.point) == dict(point)]
    own += [resize(item, spec, point) for item in sets if dict(item.point) != dict(point)]
    found: list[InputSet] = []
    for item in own:
        if len(found) < NUM_TIMED_INPUTS and not any(_equal(item, other) for other in found):
            found.append(item)
    if any(needs_range(item) for item in spec.tensors):
        return found  # such inputs come from samples alone
    return [*found, *(generate_at(spec, point, seed=1000 + i) for i in range(NUM_TIMED_INPUTS - len(found)))]


def _equal(one: InputSet, other: InputSet) -> bool:
    return all(same_tensors(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
