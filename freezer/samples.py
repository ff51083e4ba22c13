"""Sets of inputs: real ones from a file, or generated from fixed seeds over the corner and middle points of all dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from freezer.errors import MissingDependencyError, SpecError
from freezer.sample_files import CODE, READ_ERRORS, Header, as_sets, match_headers, unreadable
from freezer.spec import COMPLEX, FLOATING, INTEGRAL, InputSpec, TensorSpec
from freezer.tensor_files import load_tensors

NUM_GENERATED_SETS = 8
"""docs/measuring.md: at least 8 sets from fixed seeds."""

FULL_MASKS_EVERY = 4
"""Of so many generated sets one has masks that mask nothing: what a model is served most often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSet:
    """One set of tensor inputs by name, in the order of the spec, and the sizes of the named dims in it."""

    point: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def cloned(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a call that may write into its inputs."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def generate(spec: InputSpec, *, num_sets: int = NUM_GENERATED_SETS) -> list[InputSet]:
    """Generated input sets: every point of the spec in turn, from fixed seeds, contiguous, on the CPU.

    With a range, values are uniform in it, both ends of integers included. Without one, floats and complex numbers are standard
    normal and bools are fair coins. What is named a mask and has no range is ones followed by zeros along its last dim.

    Raises:
        SpecError: an integer input has neither a range nor a mask's name.
    """
    points = list(spec.points())
    return [generate_at(spec, points[i % len(points)], seed=i) for i in range(max(num_sets, len(points)))]


def generate_at(spec: InputSpec, point: Mapping[str, int], *, seed: int) -> InputSet:
    """One generated input set at a point; see `generate`."""
    generator = torch.Generator().manual_seed(seed)
    full = seed % FULL_MASKS_EVERY == FULL_MASKS_EVERY - 1
    return InputSet(
        point=dict(point), tensors={item.name: _tensor(item, item.at(point), generator, full=full) for item in spec.tensors}
    )


def needs_range(item: TensorSpec) -> bool:
    """Whether nothing but a range says what may be generated for an input: an integer that is no mask, and not empty."""
    return item.dtype in INTEGRAL and item.dtype != "bool" and item.range is None and not is_mask(item) and 0 not in item.shape


def is_mask(item: TensorSpec) -> bool:
    """Whether an input is generated as a mask."""
    return item.range is None and "mask" in item.name.lower() and item.dtype not in COMPLEX


def _tensor(item: TensorSpec, shape: tuple[int, ...], generator: torch.Generator, *, full: bool) -> Tensor:
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


def _mask(item: TensorSpec, shape: tuple[int, ...], generator: torch.Generator, *, full: bool) -> Tensor:
    """Ones followed by zeros along the last dim, at least one 1; a last dim of 2 or more is masked somewhere, unless `full`.

    A bool, and what is named padding, may as well say what to leave out: all ones would leave everything out, so none is full.
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
    """The error for an integer input of which nothing says what it holds."""
    return SpecError(f"input {item.name!r}: an integer input needs `range: [low, high]` (both included), or samples{note}")


def read_samples(path: Path) -> list[dict[str, Tensor]]:
    """The input sets of a .safetensors or .npz file.

    Keys are input names (one set), or `<index>/<name>` with indices from 0 (several sets).

    Raises:
        SpecError: the file cannot be read, is of another kind, or its keys do not form sets; code CP-SAMPLES.
    """
    try:
        flat = _read_tensors(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return as_sets(path, flat)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_tensors(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    if path.suffix == ".npz":
        try:
            import numpy as np
        except ImportError:
            raise MissingDependencyError("reading .npz needs numpy; pip install numpy") from None
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # of a damaged file np.load keeps its own open
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    raise ValueError(f"suffix {path.suffix!r} is unknown")


def match_samples(sets: Sequence[Mapping[str, Tensor]], spec: InputSpec) -> list[InputSet]:
    """Samples held against a spec.

    Raises:
        SpecError: names, dtypes, shapes or sizes differ from the spec; code CP-SAMPLES.
    """
    points = match_headers([{name: _header(tensor) for name, tensor in tensors.items()} for tensors in sets], spec)
    return [InputSet(point=point, tensors=_ordered(tensors, spec)) for point, tensors in zip(points, sets, strict=True)]


def _header(tensor: Tensor) -> Header:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _ordered(tensors: Mapping[str, Tensor], spec: InputSpec) -> dict[str, Tensor]:
    return {item.name: tensors[item.name].contiguous() for item in spec.tensors}


def spec_of_samples(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Tensor specs that fit one sample set exactly; see `tensor_spec`.

    Raises:
        SpecError: a tensor is of a dtype that no input may have; code CP-SAMPLES.
    """
    try:
        return tuple(tensor_spec(name, tensor) for name, tensor in tensors.items())
    except SpecError as error:
        raise SpecError(f"samples: {error}", code=CODE) from None


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of one example tensor. Integers get the range of its values; a mask of zeros and ones needs none.

    Raises:
        SpecError: it is not dense.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(
            f"input {name!r}: got a {kind} tensor, expected a dense one; give .to_dense(), or its parts as inputs of their own, "
            "and put it together in forward"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
    if dtype not in INTEGRAL or dtype == "bool" or tensor.numel() == 0:
        return plain
    low, high = int(tensor.min()), int(tensor.max())
    return plain if is_mask(plain) and low >= 0 and high <= 1 else replace(plain, range=(low, high))


def cover_points(sets: Sequence[InputSet], spec: InputSpec) -> list[InputSet]:
    """The samples, and for every corner or middle point that none of them has, a sample cut or repeated to that size."""
    covered = [dict(item.point) for item in sets]
    missing = [point for point in spec.points() if point not in covered]
    return [*sets, *(resize(sets[index % len(sets)], spec, point) for index, point in enumerate(missing))]


def with_points(
    sets: Sequence[InputSet], spec: InputSpec, points: Sequence[Mapping[str, int]], *, generated: bool
) -> list[InputSet]:
    """The sets, one for each of some points that none of them has, and one at sizes that are no such point, where there are any.

    The last is what only a payload for all sizes serves.

    Args:
        sets: at least one.
        points: that have payloads of their own.
        generated: make new sets; else others are cut or repeated to size.
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


def resize(item: InputSet, spec: InputSpec, point: Mapping[str, int]) -> InputSet:
    """An input set at another point: rows of the named dims are taken in order, from the start again when they run out."""
    tensors = dict(item.tensors)
    for declared in spec.tensors:
        tensor = tensors[declared.name]
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and tensor.shape[axis] != point[size]:
                tensor = tensor.index_select(axis, torch.arange(point[size]) % tensor.shape[axis])
        tensors[declared.name] = tensor.contiguous()
    return InputSet(point=dict(point), tensors=tensors)
