"""JSON documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value, first its own."""
    yield place
    if isinstance(value, dict):
        for name, part in value.items():
            yield from places(part, (*place, name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*place, index))
