"""Input contract of a model: tensors and constants, with shapes over named, bounded dims. Imports
no torch.

A shape is a tuple of ints and dim names: `("batch", 3, 224, 224)`. A `Dim` bounds every dim name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from dataclasses import replace as replaced
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from freezer.codec import OMIT_DEFAULT, frozen, keyed_by
from freezer.errors import SpecError, expected_names
from freezer.spec.items import (
    ConstantSpec,
    InputItem,
    Point,
    Sizes,
    TensorSpec,
    put_together,
    walk,
    with_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor


import random
from collections.abc import Iterable
from itertools import cycle, islice

MAX_CORNERS = 64
"""Most corner points to return all of; six varying dims have as many."""


@frozen
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
            raise SpecError(f"dim {self}: expected 1 <= min <= max")
        step = self.multiple_of
        if step < 1 or self.min % step or self.max % step:
            raise SpecError(
                f"dim {self}: min and max must be multiples of {step}, which is positive"
            )

    @property
    def varies(self) -> bool:
        """Whether it has several sizes."""
        return self.min < self.max

    @property
    def sizes(self) -> range:
        """All sizes, ascending."""
        return range(self.min, self.max + 1, self.multiple_of)

    def __str__(self) -> str:
        step = f" in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.name} from {self.min} to {self.max}{step}"


@frozen
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
        names = [item.name for item in self.items]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"input {name!r} is given twice")
        dims = [dim.name for dim in self.dims]
        users: dict[str, str] = {}
        for tensor in self.tensors:
            users |= {size: tensor.name for size in tensor.shape if isinstance(size, str)}
        for name, user in users.items():
            if name not in dims:
                raise SpecError(
                    f"input {user!r}: dim {name!r} is not in dims; {expected_names(name, dims)}, or"
                    " a new one such as `batch: {min: 1, max: 8}`"
                )
        for name in dims:
            if name not in users:
                raise SpecError(
                    f"dim {name!r} is used by no input; remove it or name it in a shape"
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

    def first_point(self) -> Sizes:
        """The default point for latency: every dim at its minimum."""
        return {dim.name: dim.min for dim in self.dims}

    def named_points(self, given: Sequence[Point]) -> tuple[Sizes, ...]:
        """Complete declared points: missing dims take their minimum; no points at all give the
        first point.

        Raises:
            SpecError: a point has an unknown dim or a size out of bounds, or is given twice.
        """
        least = self.first_point()
        dims = {dim.name: dim for dim in self.dims}
        points = []
        for named in given:
            point = {**least, **named}
            for name, size in point.items():
                if name not in dims:
                    expected = expected_names(name, dims)
                    raise SpecError(f"point {named}: {name!r} is not a declared dim; {expected}")
                if type(size) is not int or size not in dims[name].sizes:
                    raise SpecError(f"point {named}: expected {dims[name]}")
            if point in points:
                raise SpecError(f"point {named}: the point is given twice; remove one")
            points.append(point)
        return tuple(points or [least])

    def further_sizes(self, named: Sequence[Point]) -> tuple[Sizes, ...]:
        """The middle and the largest size of every dim, without those among the points that are
        named.
        """
        return tuple(distinct((self._middle(), self.largest_point()), named))

    def points(self) -> Iterator[Sizes]:
        """The corner points of all dims, then the middle, without duplicates.

        With more than MAX_CORNERS corners: all dims at their minimum, all at their maximum, the
        middle, and each end of every dim with the others in the middle. Every two dims then differ
        at some point, and the number of points is linear in that of dims.
        """
        ends = {dim.name: sorted({dim.min, dim.max}) for dim in self.dims}
        middle = self._middle()
        if math.prod(map(len, ends.values())) > MAX_CORNERS:
            corners = [self.first_point(), self.largest_point(), middle]
            for name, sizes in ends.items():
                corners += [{**middle, name: size} for size in sizes]
        else:
            corners = [dict(zip(ends, sizes, strict=True)) for sizes in product(*ends.values())]
        yield from distinct((*corners, middle))

    def _middle(self) -> Sizes:
        """The size of every dim between the least and the largest, by ratio."""
        middle = {}
        for dim in self.dims:
            steps = math.isqrt(dim.min * dim.max) // dim.multiple_of
            middle[dim.name] = max(dim.min, steps * dim.multiple_of)
        return middle

    def largest_point(self) -> Sizes:
        """Every dim at its maximum."""
        return {dim.name: dim.max for dim in self.dims}

    def at(self, point: Point) -> InputSpec:
        """The inputs with every dim fixed to its size at a point."""
        return InputSpec(
            inputs=self._changed(lambda tensor: replaced(tensor, shape=tensor.at(point))),
            style=self.style,
        )

    def each(self, change: Callable[[TensorSpec], TensorSpec]) -> InputSpec:
        """The inputs with every tensor replaced by `change` of it."""
        return replaced(self, inputs=self._changed(change))

    def _changed(self, change: Callable[[TensorSpec], TensorSpec]) -> tuple[InputItem, ...]:
        return tuple(with_tensors(item, change) for item in self.inputs)


def bind(
    spec: InputSpec,
    tensors: Mapping[str, Tensor],
) -> tuple[list[Any], dict[str, Any]]:
    """Args and kwargs for the source model, from tensors by path and the constants."""
    values = {item.name: put_together(item, tensors) for item in spec.inputs}
    if spec.style == "positional":
        return list(values.values()), {}
    return [], values


MAX_COMBINATIONS = 4096
"""The most combinations of sizes to try."""

Points = list[Sizes]


def interior_points(spec: InputSpec, count: int) -> Points:
    """At most `count` points between the bounds that are not of `spec.points()`: in turn of odd
    sizes and of any.
    """
    chosen = random.Random(0)
    inner = {dim.name: list(dim.sizes[1:-1] or dim.sizes) for dim in spec.dims}
    odd = {}
    for name, sizes in inner.items():
        odd[name] = [size for size in sizes if size % 2] or sizes
    drawn = []
    for index in range(8 * count):
        choices = inner if index % 2 else odd
        drawn.append({name: chosen.choice(sizes) for name, sizes in choices.items()})
    return distinct(drawn, list(spec.points()))[:count]


def all_sizes(spec: InputSpec) -> Points:
    """Points with every size of each dim and random sizes of the others, and with all dims at equal
    sizes, in a random order.
    """
    chosen, names = random.Random(2), [dim.name for dim in spec.dims]
    most = max(len(dim.sizes) for dim in spec.dims)
    columns = []
    for dim in spec.dims:
        columns.append(chosen.sample(list(islice(cycle(dim.sizes), most)), most))
    rows = list(zip(*columns, strict=True))
    equal = set(spec.dims[0].sizes).intersection(*(dim.sizes for dim in spec.dims))
    rows += [(size,) * len(names) for size in equal]
    points = distinct(dict(zip(names, row, strict=True)) for row in rows)
    return chosen.sample(points, len(points))


def combinations(spec: InputSpec) -> Points:
    """All points in a random order; MAX_COMBINATIONS random ones if there are more."""
    chosen = random.Random(3)
    sizes = {dim.name: dim.sizes for dim in spec.dims}
    if math.prod(map(len, sizes.values())) > MAX_COMBINATIONS:
        drawn = []
        for _ in range(MAX_COMBINATIONS):
            drawn.append({name: chosen.choice(each) for name, each in sizes.items()})
        return distinct(drawn)
    points = [dict(zip(sizes, row, strict=True)) for row in product(*sizes.values())]
    return chosen.sample(points, len(points))


def distinct(
    points: Iterable[Sizes],
    known: Sequence[Point] = (),
) -> Points:
    """The points in order, without those that are known, and without repetitions."""
    by_sizes = {}
    for point in points:
        if point not in known:
            by_sizes[tuple(point.values())] = point
    return list(by_sizes.values())
