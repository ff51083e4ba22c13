"""What a model takes and gives: names, dtypes and shapes with named, bounded dims. Pure data; imports no torch.

A shape is a tuple of positive ints and dim names: `("batch", 3, 224, 224)`. Every dim name is bound by a `Dim`.
The JSON form of each record (`to_json`, `from_json`) is part of the manifest's format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from freezer.codec import keyed_by, written_if
from freezer.errors import SpecError
from freezer.spec.items import (
    ConstantSpec,
    InputItem,
    Point,
    TensorSpec,
    put_together,
    walk,
    with_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_CORNERS = 64
"""Corner points are taken one and all while there are no more: those of six dims that vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A named dimension that may be any multiple of `multiple_of` from `min` to `max`, both included."""

    name: str
    min: int
    max: int
    multiple_of: int = field(default=1, metadata=written_if(lambda dim: dim.multiple_of > 1))

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"dim {self.name!r}: a dim's name must be an identifier")
        if not 1 <= self.min <= self.max:
            raise SpecError(f"dim {self.name!r}: got min {self.min}, max {self.max}; expected 1 <= min <= max")
        if self.multiple_of < 1 or self.min % self.multiple_of or self.max % self.multiple_of:
            raise SpecError(
                f"dim {self.name!r}: got min {self.min}, max {self.max}, multiple_of {self.multiple_of}; "
                "expected min and max to be multiples of it"
            )

    @property
    def sizes(self) -> range:
        """Every size that it may be, in order."""
        return range(self.min, self.max + 1, self.multiple_of)

    def __str__(self) -> str:
        return f"{self.name} from {self.min} to {self.max}" + (
            f" in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """All inputs of a model, in the order of a call.

    Attributes:
        inputs: tensors, constants, and tuples, lists and dicts of them.
        dims: the named dims that the shapes use.
        style: how the source model is called; a frozen model accepts both ways.
    """

    inputs: tuple[InputItem, ...]
    dims: tuple[Dim, ...] = field(default=(), metadata=keyed_by("name"))
    style: Literal["keyword", "positional"] = "keyword"

    def __post_init__(self) -> None:
        names: set[str] = set()
        for item in self.items:
            if item.name in names:
                raise SpecError(f"input {item.name!r} is given twice")
            names.add(item.name)
        bound = [dim.name for dim in self.dims]
        for name in bound:
            if bound.count(name) > 1:
                raise SpecError(f"dim {name!r} is given twice")
        used = {size for item in self.tensors for size in item.shape if isinstance(size, str)}
        for tensor in self.tensors:
            for size in tensor.shape:
                if isinstance(size, str) and size not in bound:
                    raise SpecError(f"input {tensor.name!r}: dim {size!r} is unbound; add `{size}: {{min: 1, max: 8}}` to dims")
        for name in bound:
            if name not in used:
                raise SpecError(f"dim {name!r} is used by no input; remove it or name it in a shape")

    @property
    def items(self) -> Iterator[InputItem]:
        """The inputs and everything in them, parts after their whole."""
        for item in self.inputs:
            yield from walk(item)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The leaves that are tensors, in order."""
        return tuple(item for item in self.items if isinstance(item, TensorSpec))

    @property
    def constants(self) -> dict[str, Any]:
        """The leaves that are constants, by path."""
        return {item.name: item.value for item in self.items if isinstance(item, ConstantSpec)}

    def first_point(self) -> dict[str, int]:
        """The point that latency is judged at unless the entry names another: every dim at its least."""
        return {dim.name: dim.min for dim in self.dims}

    def named_points(self, given: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], ...]:
        """The points that an entry names, each with a size for every dim: a dim that a point leaves out takes its least.

        Args:
            given: sizes by dim name; none at all is the first point alone.

        Raises:
            SpecError: a point names no dim, a size that its dim does not take, or one that is there already.
        """
        found: list[dict[str, int]] = []
        for named in given:
            for name in named:
                if name not in self.first_point():
                    known = ", ".join(self.first_point()) or "none are declared"
                    raise SpecError(f"point {dict(named)}: {name!r} is no declared dim; those are: {known}")
            for dim in self.dims:
                size = named.get(dim.name, dim.min)
                if type(size) is not int or size not in dim.sizes:
                    raise SpecError(f"point {dict(named)}: got {dim.name} {size!r}, expected {dim}")
            point = {dim.name: named.get(dim.name, dim.min) for dim in self.dims}
            if point in found:
                raise SpecError(f"point {dict(named)}: the sizes {point} are given twice; remove one")
            found.append(point)
        return tuple(found) or (self.first_point(),)

    def points(self) -> Iterator[dict[str, int]]:
        """The corner points of all dims, then the middle; no point twice.

        Where there are more than MAX_CORNERS corners: all dims at their least, all at their most, the middle, and each end of every
        dim beside the others' middle. Every pair of dims is then seen apart, and the number grows with that of the dims.
        """
        seen: set[tuple[int, ...]] = set()
        ends = [(dim.min, dim.max) for dim in self.dims]
        middle = tuple(max(dim.min, math.isqrt(dim.min * dim.max) // dim.multiple_of * dim.multiple_of) for dim in self.dims)
        corners: Iterable[tuple[int, ...]] = product(*(dict.fromkeys(sizes) for sizes in ends))
        if 2 ** sum(low < high for low, high in ends) > MAX_CORNERS:
            beside = [(*middle[:axis], end, *middle[axis + 1 :]) for axis, sizes in enumerate(ends) for end in sizes]
            corners = (*zip(*ends, strict=True), middle, *beside)
        for sizes in (*corners, middle):
            if sizes not in seen:
                seen.add(sizes)
                yield dict(zip((dim.name for dim in self.dims), sizes, strict=True))

    def at(self, point: Point) -> InputSpec:
        """The same inputs with every dim fixed to the point's sizes."""
        fixed = tuple(with_tensors(item, lambda tensor: replaced(tensor, shape=tensor.at(point))) for item in self.inputs)
        return InputSpec(inputs=fixed, style=self.style)

    def with_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> InputSpec:
        """The same inputs, with the ranges of some tensors set by path."""
        changed = tuple(
            with_tensors(item, lambda tensor: replaced(tensor, range=ranges.get(tensor.name, tensor.range))) for item in self.inputs
        )
        return replaced(self, inputs=changed)


def bind(spec: InputSpec, tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The args and kwargs of a call of the source model: tensors, which are given by path, and constants take their places."""
    if spec.style == "positional":
        return [put_together(item, tensors) for item in spec.inputs], {}
    return [], {item.name: put_together(item, tensors) for item in spec.inputs}
