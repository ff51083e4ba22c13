"""Sets of tensor inputs: resized to other points, and generated from fixed seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from freezer.compare.tensor_values import same_tensors
from freezer.errors import SpecError
from freezer.runtime.devices import tensors_on
from freezer.spec import COMPLEX, FLOATING, INTEGRAL, InputSpec, TensorSpec, interior_points


def on_device(item: InputSet, device: torch.device) -> InputSet:
    """Move an input set to a device."""
    return replace(item, tensors=tensors_on(item.tensors, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSet:
    """One set of tensor inputs by name, in the order of the spec, and the sizes of the named dims
    in it.
    """

    point: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def cloned(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a call that may modify its inputs."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def resize(item: InputSet, spec: InputSpec, point: Mapping[str, int]) -> InputSet:
    """Resize an input set to another point: rows of the named dims are cut or repeated in order."""
    tensors = dict(item.tensors)
    for declared in spec.tensors:
        tensor = tensors[declared.name]
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and tensor.shape[axis] != point[size]:
                tensor = tensor.index_select(axis, torch.arange(point[size]) % tensor.shape[axis])
        tensors[declared.name] = tensor.contiguous()
    return InputSet(point=dict(point), tensors=tensors)


NUM_GENERATED_SETS = 8
"""docs/measuring.md: at least 8 sets from fixed seeds."""

NUM_INTERIOR_POINTS = 2
"""Points between the bounds, one of odd sizes, that input sets cover beside the corners and the
middle.
"""

FULL_MASKS_EVERY = 4
"""One in this many generated sets has masks that mask nothing, the most common case in serving."""

NUM_TIMED_INPUTS = 4
"""Distinct inputs that rotate while timing."""


def generate(spec: InputSpec) -> list[InputSet]:
    """Generate input sets: every point of `tried_points` in turn, from fixed seeds, contiguous, on
    the CPU.

    With a range, values are uniform in it, including both ends of integers. Without one, floats and
    complex numbers are standard normal, and bools are fair coins. An input without a range that is
    named a mask has ones followed by zeros along its last dim, one set in four zeros followed by
    ones. Of sets with masks at the largest point, one masks on the right and one on the left. An
    integer input with a range that is named a length stays within the size of the only dim that it
    lacks.

    Raises:
        SpecError: an integer input has neither a range nor a mask's name.
    """
    points = tried_points(spec)
    sets = [
        generate_at(spec, points[i % len(points)], seed=i)
        for i in range(max(NUM_GENERATED_SETS, len(points)))
    ]
    if any(is_mask(item) for item in spec.tensors):
        largest = {dim.name: dim.max for dim in spec.dims}
        found = {_padding(seed) for seed, item in enumerate(sets) if dict(item.point) == largest}
        missing = [
            seed
            for seed in range(len(sets), len(sets) + FULL_MASKS_EVERY)
            if _padding(seed) not in {*found, "none"}
        ]
        seeds = {_padding(seed): seed for seed in missing}  # one of each kind
        sets += [generate_at(spec, largest, seed=seed) for seed in seeds.values()]
    return sets


def tried_points(spec: InputSpec) -> list[dict[str, int]]:
    """The points that input sets cover: corners, middle, and points between."""
    return [*spec.points(), *interior_points(spec, NUM_INTERIOR_POINTS)]


def _padding(seed: int) -> Literal["right", "left", "none"]:
    """Where the masks of a generated set mask: after the ones, before them, or nowhere."""
    place = seed % FULL_MASKS_EVERY
    return (
        "none"
        if place == FULL_MASKS_EVERY - 1
        else "left"
        if place == FULL_MASKS_EVERY - 2
        else "right"
    )


def generate_at(spec: InputSpec, point: Mapping[str, int], *, seed: int) -> InputSet:
    """Generate one input set at a point; see `generate`."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for item in spec.tensors:
        declared = _within_length(item, spec, point)
        tensors[item.name] = _tensor(
            declared, item.at(point), generator, full=_padding(seed) == "none"
        )
        if is_mask(item) and item.shape and _padding(seed) == "left":
            tensors[item.name] = tensors[item.name].flip(-1)
    return InputSet(point=dict(point), tensors=tensors)


def _within_length(item: TensorSpec, spec: InputSpec, point: Mapping[str, int]) -> TensorSpec:
    """Lengths, such as [batch] beside inputs of [batch, seq], with a range that ends at the size of
    the other dim.
    """
    others = [dim.name for dim in spec.dims if dim.name not in item.shape]
    if (
        item.dtype not in INTEGRAL
        or item.range is None
        or "length" not in item.name.lower()
        or len(others) != 1
    ):
        return item
    low, high = item.range
    return replace(item, range=(min(low, point[others[0]]), min(high, point[others[0]])))


def distinct_at(
    spec: InputSpec, sets: Sequence[InputSet], point: Mapping[str, int]
) -> list[InputSet]:
    """Distinct input sets at a point, for timing: those at the point, then others cut or repeated
    to size, then generated ones.
    """
    own = [item for item in sets if dict(item.point) == dict(point)]
    own += [resize(item, spec, point) for item in sets if dict(item.point) != dict(point)]
    found: list[InputSet] = []
    for item in own:
        if len(found) < NUM_TIMED_INPUTS and not any(
            all(same_tensors(tensor, other.tensors[name]) for name, tensor in item.tensors.items())
            for other in found
        ):
            found.append(item)
    if any(needs_range(item) for item in spec.tensors):
        return found  # such inputs are never generated
    return [
        *found,
        *(generate_at(spec, point, seed=1000 + i) for i in range(NUM_TIMED_INPUTS - len(found))),
    ]


def needs_range(item: TensorSpec) -> bool:
    """Whether an input needs a range to be generated: integers that are neither masks nor empty."""
    return (
        item.dtype in INTEGRAL
        and item.dtype != "bool"
        and item.range is None
        and not is_mask(item)
        and 0 not in item.shape
    )


def is_mask(item: TensorSpec) -> bool:
    """Whether an input is generated as a mask."""
    return item.range is None and "mask" in item.name.lower() and item.dtype not in COMPLEX


def _tensor(
    item: TensorSpec, shape: tuple[int, ...], generator: torch.Generator, *, full: bool
) -> Tensor:
    dtype: torch.dtype = getattr(torch, item.dtype)
    if is_mask(item):
        return _mask(item, shape, generator, full=full).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(dtype)
    if item.dtype in FLOATING:
        if item.range:
            low, high = item.range
            return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)
    if needs_range(item):
        raise range_is_needed(item)
    low, high = (int(bound) for bound in item.range or (0, 1))
    beyond = min(high + 1, torch.iinfo(torch.int64).max)
    return torch.randint(low, beyond, shape, generator=generator, dtype=torch.int64).to(dtype)


def _mask(
    item: TensorSpec, shape: tuple[int, ...], generator: torch.Generator, *, full: bool
) -> Tensor:
    """Ones followed by zeros along the last dim, with at least one 1; unless `full`, something is
    masked.

    For bools and padding masks, a 1 may mean "ignore": these are never all ones, which would ignore
    everything.
    """
    if not shape or 0 in shape:
        return torch.ones(shape)
    length = shape[-1]
    either = item.dtype == "bool" or "pad" in item.name.lower()
    most = max(1, length - 1) if either else length
    lengths = torch.randint(1, most + 1, (*shape[:-1], 1), generator=generator)
    if full and not either:
        lengths.fill_(length)
    elif bool((lengths == length).all()):
        lengths.view(-1)[0] = max(1, length - 1)
    return torch.arange(length) < lengths


def range_is_needed(item: TensorSpec, note: str = "") -> SpecError:
    """Error for an integer input without a range or samples."""
    return SpecError(
        f"input {item.name!r}: an integer input needs `range: [low, high]` (both included), or"
        f" samples{note}"
    )
