"""Sets of tensor inputs: resized to other points, and generated from fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from freezer.codec import frozen
from freezer.errors import SpecError
from freezer.runtime.devices import tensors_on
from freezer.runtime.tensors import cloned, dtype_name, same_tensors
from freezer.spec import (
    COMPLEX,
    FLOATING,
    INTEGRAL,
    InputSpec,
    TensorSpec,
    interior_points,
    match_headers,
)

CHUNK = 2**14
"""Numbers that are made at once, so that intermediate results stay in the CPU's cache."""


class Draws(np.random.PCG64DXSM):
    """A stream of random numbers from a seed, with the same bits on every platform and torch.

    torch's own differ: it fills tensors by formulas that depend on the instructions of the CPU.
    Here all are made of the integers of NumPy's PCG64DXSM, a stream that NumPy never changes, by
    operations that IEEE 754 rounds exactly.
    """

    def integers(self, low: int, beyond: int, shape: Sequence[int]) -> Tensor:
        """Integers from `low` to `beyond` - 1, int64."""
        offsets = self.random_raw(math.prod(shape)) % np.uint64(beyond - low)
        return torch.from_numpy(offsets.view(np.int64) + np.int64(low)).view(tuple(shape))

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Nearly standard normal numbers below 6, float32: each is the sum of twelve uniform ones,
        whose variances are 1/12.
        """
        values = torch.empty(tuple(shape), dtype=torch.float32)
        for part in values.view(-1).split(CHUNK):
            total = np.zeros(len(part))
            for _ in range(6):
                raw = self.random_raw(len(part))
                total += (raw >> 32) + (raw & (2**32 - 1))
            part.numpy()[:] = (total - 6 * (2.0**32 - 1)) * 2.0**-32
        return values


@frozen
class InputSet:
    """One set of tensor inputs by name, in the order of the spec, and the sizes of the named dims
    in it.
    """

    point: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def cloned(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a call that may modify its inputs."""
        return cloned(self.tensors)

    def equals(self, other: InputSet) -> bool:
        """Whether another set has the same tensors."""
        return all(map(same_tensors, self.tensors.values(), other.tensors.values()))


def match_samples(sets: Sequence[Mapping[str, Tensor]], spec: InputSpec) -> list[InputSet]:
    """Samples as input sets.

    Raises:
        SpecError: names, dtypes, shapes or sizes differ from the spec; code CP-SAMPLES.
    """
    headers = []
    for tensors in sets:
        items = tensors.items()
        headers.append({name: (dtype_name(part.dtype), tuple(part.shape)) for name, part in items})
    matched = []
    for point, tensors in zip(match_headers(headers, spec), sets, strict=True):
        ordered = {item.name: tensors[item.name].contiguous() for item in spec.tensors}
        matched.append(InputSet(point=point, tensors=ordered))
    return matched


def on_device(
    inputs: InputSet,
    device: torch.device,
) -> InputSet:
    """Move an input set to a device."""
    return replace(inputs, tensors=tensors_on(inputs.tensors, device))


def resize(
    inputs: InputSet,
    spec: InputSpec,
    point: Mapping[str, int],
) -> InputSet:
    """Resize an input set to another point: rows of the named dims are cut or repeated in order."""
    tensors = dict(inputs.tensors)
    for item in spec.tensors:
        tensor = tensors[item.name]
        for axis, size in enumerate(item.at(point)):
            before = tensor.shape[axis]
            if before != size:
                tensor = tensor.index_select(axis, torch.arange(size) % before)
        tensors[item.name] = related(item, tensor.contiguous(), spec, point)
    return InputSet(point=dict(point), tensors=tensors)


def related(
    item: TensorSpec,
    tensor: Tensor,
    spec: InputSpec,
    point: Mapping[str, int],
) -> Tensor:
    """Integers changed so that they keep to the relation of their input; see TensorSpec."""
    if item.relation is None or not tensor.numel():
        return tensor
    others = [other for other in spec.tensors if other.name != item.name]
    dims = {size for other in others for size in other.shape} - set(item.shape)
    sizes = [point[size] for size in dims if isinstance(size, str)]
    if not sizes:
        sizes = [size for other in others for size in other.at(point) if size > 1]
    tensor = tensor.remainder(max(1, min(sizes, default=1)))
    if item.relation == "below":
        return tensor
    ascending = tensor.sort(-1).values
    return ascending - ascending[..., :1]


NUM_GENERATED_SETS = 8
"""docs/reference/measuring.md: at least 8 sets from fixed seeds."""

NUM_INTERIOR_POINTS = 2
"""Points between the bounds, one of odd sizes, that input sets cover beside the corners and the
middle.
"""

_PADDINGS = ("right", "right", "left", "none")
"""Where the masks of generated sets mask, in turn; "none" is the most common case in serving."""

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
    num_sets = max(NUM_GENERATED_SETS, len(points))
    largest = spec.largest_point()
    sets: list[InputSet] = []
    paddings = {"none"}
    for seed in range(num_sets):
        point = points[seed % len(points)]
        sets.append(generate_at(spec, point, seed=seed))
        if point == largest:
            paddings.add(_padding(seed))
    if any(map(is_mask, spec.tensors)):
        seeds = {_padding(seed): seed for seed in range(num_sets, num_sets + len(_PADDINGS))}
        for padding, seed in seeds.items():
            if padding not in paddings:
                sets.append(generate_at(spec, largest, seed=seed))
    return sets


def tried_points(spec: InputSpec) -> list[dict[str, int]]:
    """The points that input sets cover: corners, middle, and points between."""
    return [*spec.points(), *interior_points(spec, NUM_INTERIOR_POINTS)]


def _padding(seed: int) -> str:
    """Where the masks of a generated set mask: after the ones, before them, or nowhere."""
    return _PADDINGS[seed % len(_PADDINGS)]


def generate_at(
    spec: InputSpec,
    point: Mapping[str, int],
    *,
    seed: int,
) -> InputSet:
    """Generate one input set at a point; see `generate`."""
    draws = Draws(seed)
    padding = _padding(seed)
    tensors: dict[str, Tensor] = {}
    for item in spec.tensors:
        bounded = _within_length(item, spec, point)
        tensor = _tensor(
            bounded,
            item.at(point),
            draws,
            full=padding == "none",
        )
        if padding == "left" and item.shape and is_mask(item):
            tensor = tensor.flip(-1)
        tensors[item.name] = related(item, tensor, spec, point)
    return InputSet(point=dict(point), tensors=tensors)


def _within_length(
    item: TensorSpec,
    spec: InputSpec,
    point: Mapping[str, int],
) -> TensorSpec:
    """Lengths, such as [batch] beside inputs of [batch, seq], with a range that ends at the size of
    the other dim.
    """
    others = [dim.name for dim in spec.dims if dim.name not in item.shape]
    if item.range is None or item.dtype not in INTEGRAL or len(others) != 1:
        return item
    if "length" not in item.name.lower():
        return item
    [other] = others
    size = point[other]
    low, high = item.range
    return replace(item, range=(min(low, size), min(high, size)))


def distinct_at(
    spec: InputSpec,
    sets: Sequence[InputSet],
    point: Mapping[str, int],
) -> list[InputSet]:
    """Distinct input sets at a point, for timing: those at the point, then others cut or repeated
    to size, then generated ones.
    """
    distinct: list[InputSet] = []
    for inputs in sorted(sets, key=lambda inputs: inputs.point != point):  # those there first
        if len(distinct) == NUM_TIMED_INPUTS:
            return distinct
        resized = resize(inputs, spec, point) if inputs.point != point else inputs
        if not any(map(resized.equals, distinct)):
            distinct.append(resized)
    if any(map(needs_range, spec.tensors)):
        return distinct  # such inputs are never generated
    for seed in range(1000, 1000 + NUM_TIMED_INPUTS - len(distinct)):
        distinct.append(generate_at(spec, point, seed=seed))
    return distinct


def needs_range(item: TensorSpec) -> bool:
    """Whether an input needs a range to be generated: integers that are neither masks nor empty."""
    if item.dtype not in INTEGRAL or item.dtype == "bool" or is_mask(item):
        return False
    return item.range is None and 0 not in item.shape


def is_mask(item: TensorSpec) -> bool:
    """Whether an input is generated as a mask."""
    if item.range is not None or item.dtype in COMPLEX:
        return False
    return "mask" in item.name.lower()


def _tensor(
    item: TensorSpec,
    shape: tuple[int, ...],
    draws: Draws,
    *,
    full: bool,
) -> Tensor:
    dtype: torch.dtype = getattr(torch, item.dtype)
    low, high = item.range or (0, 1)
    if is_mask(item):
        values = _mask(
            item,
            shape,
            draws,
            full=full,
        )
    elif dtype.is_complex:
        values = torch.view_as_complex(draws.normal((*shape, 2)) * 0.5**0.5)
    elif item.dtype in FLOATING and item.range:
        steps = draws.integers(0, 2**24, shape).float()
        values = steps * ((high - low) / 2**24) + low
    elif item.dtype in FLOATING:
        values = draws.normal(shape)
    elif needs_range(item):
        raise range_is_needed(item)
    else:
        beyond = min(int(high) + 1, torch.iinfo(torch.int64).max)
        values = draws.integers(int(low), beyond, shape)
    return values.to(dtype)


def _mask(
    item: TensorSpec,
    shape: tuple[int, ...],
    draws: Draws,
    *,
    full: bool,
) -> Tensor:
    """Ones followed by zeros along the last dim, with at least one 1; unless `full`, something is
    masked.

    For bools and padding masks, a 1 may mean "ignore": these are never all ones, which would ignore
    everything.
    """
    if not shape or 0 in shape:
        return torch.ones(shape)
    length = shape[-1]
    shorter = max(1, length - 1)
    either = item.dtype == "bool" or "pad" in item.name.lower()
    most = shorter if either else length
    lengths = draws.integers(1, most + 1, (*shape[:-1], 1))
    if full and not either:
        lengths.fill_(length)
    elif bool((lengths == length).all()):
        lengths.view(-1)[0] = shorter
    return torch.arange(length) < lengths


def range_is_needed(item: TensorSpec, note: str = "") -> SpecError:
    """Error for an integer input without a range or samples."""
    return SpecError(
        f"input {item.name!r}: an integer input needs `range: [low, high]` (both included), or"
        f" samples{note}"
    )
