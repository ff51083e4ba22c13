"""Input sets from real samples: matched with the spec, and cut or repeated to cover all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, product

import torch
from torch import Tensor

from freezer.errors import SpecError
from freezer.runtime.input_sets import InputSet, generate_at, is_mask, resize
from freezer.spec.inputs import InputSpec
from freezer.spec.items import INTEGRAL, TensorSpec
from freezer.spec.sample_headers import CODE, Header, match_headers


def match_samples(sets: Sequence[Mapping[str, Tensor]], spec: InputSpec) -> list[InputSet]:
    """Samples as input sets.

    Raises:
        SpecError: names, dtypes, shapes or sizes differ from the spec; code CP-SAMPLES.
    """

    def header(tensor: Tensor) -> Header:
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    points = match_headers([{name: header(tensor) for name, tensor in tensors.items()} for tensors in sets], spec)
    return [
        InputSet(point=point, tensors={item.name: tensors[item.name].contiguous() for item in spec.tensors})
        for point, tensors in zip(points, sets, strict=True)
    ]


def spec_of_samples(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Tensor specs with the exact shapes of one sample set; see `tensor_spec`.

    Raises:
        SpecError: a tensor cannot be an input; code CP-SAMPLES.
    """
    try:
        return tuple(tensor_spec(name, tensor) for name, tensor in tensors.items())
    except SpecError as error:
        raise SpecError(f"samples: {error}", code=CODE) from None


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of one example tensor. Integers get the range of its values, except a mask of zeros and ones.

    Raises:
        SpecError: the tensor is not dense.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(
            f"input {name!r}: got a {kind} tensor, expected a dense one; give .to_dense(), or pass its parts as separate "
            "inputs and combine them in forward"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
    if dtype not in INTEGRAL or dtype == "bool" or tensor.numel() == 0:
        return plain
    low, high = int(tensor.min()), int(tensor.max())
    return plain if is_mask(plain) and low >= 0 and high <= 1 else replace(plain, range=(low, high))


def cover_points(sets: Sequence[InputSet], spec: InputSpec) -> list[InputSet]:
    """The samples, and for every corner or middle point without one, a sample cut or repeated to its sizes."""
    covered = [dict(item.point) for item in sets]
    missing = [point for point in spec.points() if point not in covered]
    return [*sets, *(resize(sets[index % len(sets)], spec, point) for index, point in enumerate(missing))]


def with_points(
    sets: Sequence[InputSet], spec: InputSpec, points: Sequence[Mapping[str, int]], *, generated: bool
) -> list[InputSet]:
    """Add a set for each point without one, and if all sets are at such points, one at other sizes, for the payload of all sizes.

    Args:
        sets: at least one input set.
        points: points with payloads of their own.
        generated: generate new sets instead of cutting or repeating others.
    """
    found = list(sets)
    named = [dict(point) for point in points]
    held = [dict(item.point) for item in sets]
    missing = [point for point in named if point not in held]
    if all(point in named for point in held):
        ranges = product(*(dim.sizes for dim in spec.dims))
        every = (dict(zip((dim.name for dim in spec.dims), sizes, strict=True)) for sizes in ranges)
        missing += [point for point in islice(every, len(named) + 1) if point not in named][:1]
    for index, point in enumerate(missing):
        if generated:
            found.append(generate_at(spec, point, seed=len(sets) + index))
        else:
            found.append(resize(sets[index % len(sets)], spec, point))
    return found
