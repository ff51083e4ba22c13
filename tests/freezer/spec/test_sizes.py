"""Sizes to try a program at."""

from __future__ import annotations

from freezer.spec import (
    Dim,
    InputSpec,
    TensorSpec,
    all_sizes,
    combinations,
    interior_points,
)


def spec_of(**bounds: tuple[int, int, int]) -> InputSpec:
    dims = tuple(
        Dim(name=name, min=low, max=high, multiple_of=step)
        for name, (low, high, step) in bounds.items()
    )
    return InputSpec(
        inputs=(TensorSpec(name="x", dtype="float32", shape=tuple(bounds)),), dims=dims
    )


def test_interior_points_are_odd_in_turn_and_repeatable() -> None:
    spec = spec_of(height=(8, 512, 1), width=(8, 512, 1))
    points = interior_points(spec, 6)
    assert points == interior_points(spec, 6)
    assert points[:2] == interior_points(spec, 2)
    assert len(points) == 6
    assert all(size % 2 for point in points[::2] for size in point.values())
    assert any(size % 2 == 0 for point in points[1::2] for size in point.values())


def test_every_size_of_each_dim_is_tried() -> None:
    spec = spec_of(h=(1, 300, 1), w=(2, 100, 2), batch=(1, 1, 1))
    points = all_sizes(spec)
    assert {point["h"] for point in points} == {*range(1, 301)}
    assert {point["w"] for point in points} == {*range(2, 101, 2)}
    assert len(points) == 300
    square = all_sizes(spec_of(h=(1, 300, 1), w=(1, 300, 1)))
    assert sum(point["h"] == point["w"] for point in square) >= 300


def test_combinations_are_all_or_many() -> None:
    few = combinations(spec_of(h=(1, 8, 1), w=(2, 8, 2)))
    assert len(few) == len({tuple(point.items()) for point in few}) == 32
    assert 4000 < len(combinations(spec_of(h=(1, 900, 1), w=(1, 900, 1)))) <= 4096
