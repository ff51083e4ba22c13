"""Further sizes of a spec's dims to try a program at, from fixed seeds. Imports no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import cycle, islice, product

from freezer.spec.inputs import InputSpec
from freezer.spec.items import Sizes

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
    sizes = [dim.sizes for dim in spec.dims]
    if math.prod(map(len, sizes)) > MAX_COMBINATIONS:
        return distinct(_random_point(spec, chosen) for _ in range(MAX_COMBINATIONS))
    names = [dim.name for dim in spec.dims]
    points = [dict(zip(names, row, strict=True)) for row in product(*sizes)]
    return chosen.sample(points, len(points))


def _random_point(
    spec: InputSpec,
    chosen: random.Random,
) -> Sizes:
    return {dim.name: chosen.choice(dim.sizes) for dim in spec.dims}


def distinct(
    points: Iterable[Sizes],
    known: Sequence[Sizes] = (),
) -> Points:
    """The points in order, without those that are known, and without repetitions."""
    by_sizes: dict[tuple[int, ...], Sizes] = {}
    for point in points:
        if point not in known:
            by_sizes[tuple(point.values())] = point
    return list(by_sizes.values())
