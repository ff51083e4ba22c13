"""Input contract of a model: tensors and constants, with shapes over named, bounded dims. Imports
no torch.

A shape is a tuple of ints and dim names: `("batch", 3, 224, 224)`. A `Dim` bounds every dim name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from difflib import get_close_matches
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from freezer.codec import OMIT_DEFAULT, keyed_by
from freezer.errors import SpecError, expected_names
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
"""Most corner points to return all of; six varying dims have as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A named dimension: multiples of `multiple_of` from `min` to `max`, inclusive."""

    name: str
    min: int
    max: int
    multiple_of: int = field(default=1, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"dim {self.name!r}: the name must be an identifier")
        if not 1 <= self.min <= self.max:
            raise SpecError(
                f"dim {self.name!r}: got min {self.min}, max {self.max}; expected 1 <= min <= max"
            )
        if self.multiple_of < 1 or self.min % self.multiple_of or self.max % self.multiple_of:
            raise SpecError(
                f"dim {self.name!r}: got min {self.min}, max {self.max}, multiple_of"
                f" {self.multiple_of}; expected min and max to be multiples of it"
            )

    @property
    def sizes(self) -> range:
        """All sizes, ascending."""
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
        dims: the named dims of the shapes.
        style: how to call the source model; frozen models accept both styles.
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
        used = {
            size: tensor
            for tensor in self.tensors
            for size in tensor.shape
            if isinstance(size, str)
        }
        unbound: list[str] = []
        for name, tensor in used.items():
            if name not in bound:
                close = get_close_matches(name, bound, n=1)
                fix = (
                    f"did you mean {close[0]!r}, as in dims?"
                    if close
                    else f"add `{name}: {{min: 1, max: 8}}` to dims"
                )
                unbound.append(f"input {tensor.name!r}: dim {name!r} is unbound; {fix}")
        if unbound:
            raise SpecError("; ".join(unbound))
        if unused := [name for name in bound if name not in used]:
            raise SpecError(
                "; ".join(
                    f"dim {name!r} is used by no input; remove it or name it in a shape"
                    for name in unused
                )
            )

    @property
    def items(self) -> Iterator[InputItem]:
        """All inputs and their parts, in preorder."""
        for item in self.inputs:
            yield from walk(item)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, in order."""
        return tuple(item for item in self.items if isinstance(item, TensorSpec))

    @property
    def constants(self) -> dict[str, Any]:
        """Constants by path."""
        return {item.name: item.value for item in self.items if isinstance(item, ConstantSpec)}

    def first_point(self) -> dict[str, int]:
        """The default point for latency: every dim at its minimum."""
        return {dim.name: dim.min for dim in self.dims}

    def named_points(self, given: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], ...]:
        """Complete declared points: missing dims take their minimum; no points at all give the
        first point.

        Raises:
            SpecError: a point has an unknown dim or a size out of bounds, or is given twice.
        """
        least, found = self.first_point(), list[dict[str, int]]()
        for named in given:
            for name in named:
                if name not in least:
                    raise SpecError(
                        f"point {dict(named)}: {name!r} is not a declared dim;"
                        f" {expected_names(name, least)}"
                    )
            point = {**least, **named}
            for dim in self.dims:
                size = point[dim.name]
                if type(size) is not int or size not in dim.sizes:
                    raise SpecError(f"point {dict(named)}: got {dim.name} {size!r}, expected {dim}")
            if point in found:
                raise SpecError(
                    f"point {dict(named)}: the sizes {point} are given twice; remove one"
                )
            found.append(point)
        return tuple(found) or (least,)

    def further_sizes(self, named: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], ...]:
        """The middle and the largest size of every dim, without those among the points that are
        named.
        """
        sizes = (
            {dim.name: _middle(dim) for dim in self.dims},
            {dim.name: dim.max for dim in self.dims},
        )
        return tuple(
            point
            for index, point in enumerate(sizes)
            if point not in (*sizes[:index], *map(dict, named))
        )

    def points(self) -> Iterator[dict[str, int]]:
        """The corner points of all dims, then the middle, without duplicates.

        With more than MAX_CORNERS corners: all dims at their minimum, all at their maximum, the
        middle, and each end of every dim with the others in the middle. Every two dims then differ
        at some point, and the number of points is linear in that of dims.
        """
        seen: set[tuple[int, ...]] = set()
        ends = [(dim.min, dim.max) for dim in self.dims]
        middle = tuple(map(_middle, self.dims))
        corners: Iterable[tuple[int, ...]] = product(*(dict.fromkeys(sizes) for sizes in ends))
        if 2 ** sum(low < high for low, high in ends) > MAX_CORNERS:
            beside = [
                (*middle[:axis], end, *middle[axis + 1 :])
                for axis, sizes in enumerate(ends)
                for end in sizes
            ]
            corners = (*zip(*ends, strict=True), middle, *beside)
        for sizes in (*corners, middle):
            if sizes not in seen:
                seen.add(sizes)
                yield dict(zip((dim.name for dim in self.dims), sizes, strict=True))

    def at(self, point: Point) -> InputSpec:
        """The inputs with every dim fixed to its size at a point."""
        fixed = tuple(
            with_tensors(item, lambda tensor: replaced(tensor, shape=tensor.at(point)))
            for item in self.inputs
        )
        return InputSpec(inputs=fixed, style=self.style)

    def with_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> InputSpec:
        """The inputs with new ranges of some tensors, by path."""
        changed = tuple(
            with_tensors(
                item, lambda tensor: replaced(tensor, range=ranges.get(tensor.name, tensor.range))
            )
            for item in self.inputs
        )
        return replaced(self, inputs=changed)


def _middle(dim: Dim) -> int:
    """The size between the least and the largest, by ratio."""
    return max(dim.min, math.isqrt(dim.min * dim.max) // dim.multiple_of * dim.multiple_of)


def bind(spec: InputSpec, tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Args and kwargs for the source model, from tensors by path and the constants."""
    if spec.style == "positional":
        return [put_together(item, tensors) for item in spec.inputs], {}
    return [], {item.name: put_together(item, tensors) for item in spec.inputs}
