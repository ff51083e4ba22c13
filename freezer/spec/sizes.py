"""Further sizes of a spec's dims to try a program at, from fixed seeds. Imports no torch."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import chain, product

from freezer.spec.inputs import InputSpec

MAX_COMBINATIONS = 4096
"""The most combinations of sizes to try."""

_MAX_BESIDE = 24
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")

Points = list[dict[str, int]]
"""Sizes by dim name."""


def interior_points(spec: InputSpec, count: int) -> Points:
    """At most `count` points between the bounds that are not of `spec.points()`: in turn of odd
    sizes and of any.
    """
    chosen = random.Random(0)
    inner = {dim.name: dim.sizes[1:-1] or dim.sizes for dim in spec.dims}
    odd = {}
    for name, sizes in inner.items():
        odd[name] = [size for size in sizes if size % 2] or sizes
    drawn = []
    for index in range(8 * count):
        columns = inner if index % 2 else odd
        drawn.append({name: chosen.choice(sizes) for name, sizes in columns.items()})
    return distinct(drawn, list(spec.points()))[:count]


def points_beside(texts: Iterable[str], spec: InputSpec) -> Points:
    """For each number in texts such as `20 <= seq`: each dim at it and at the next sizes on both
    sides, the others at random.
    """
    numbers = dict.fromkeys(int(number) for text in texts for number in _NUMBER.findall(text))
    chosen = random.Random(1)
    found = []
    for number, dim in product(numbers, spec.dims):
        for size in dim.sizes:
            if abs(size - number) <= dim.multiple_of:
                found.append({**_drawn(chosen, spec), dim.name: size})
    return distinct(found)[:_MAX_BESIDE]


def _drawn(chosen: random.Random, spec: InputSpec) -> dict[str, int]:
    """Random sizes of all dims."""
    return {dim.name: chosen.choice(dim.sizes) for dim in spec.dims}


def all_sizes(spec: InputSpec) -> Points:
    """Points with every size of each dim and random sizes of the others, and with all dims at equal
    sizes, in a random order.
    """
    chosen, names = random.Random(2), [dim.name for dim in spec.dims]
    most = max(len(dim.sizes) for dim in spec.dims)
    columns = [
        chosen.sample(([*dim.sizes] * -(-most // len(dim.sizes)))[:most], most) for dim in spec.dims
    ]
    equal = set(spec.dims[0].sizes).intersection(*(dim.sizes for dim in spec.dims))
    every = chain(zip(*columns, strict=True), ((size,) * len(names) for size in equal))
    points = distinct(dict(zip(names, sizes, strict=True)) for sizes in every)
    return chosen.sample(points, len(points))


def combinations(spec: InputSpec) -> Points:
    """All points in a random order; MAX_COMBINATIONS random ones if there are more."""
    chosen, names = random.Random(3), [dim.name for dim in spec.dims]
    if math.prod(len(dim.sizes) for dim in spec.dims) > MAX_COMBINATIONS:
        return distinct(_drawn(chosen, spec) for _ in range(MAX_COMBINATIONS))
    every = product(*(dim.sizes for dim in spec.dims))
    points = [dict(zip(names, sizes, strict=True)) for sizes in every]
    return chosen.sample(points, len(points))


def distinct(points: Iterable[dict[str, int]], known: Sequence[dict[str, int]] = ()) -> Points:
    """The points in order, without those that are known, and without repetitions."""
    found = {tuple(point.values()): point for point in points}
    return [point for point in found.values() if point not in known]
