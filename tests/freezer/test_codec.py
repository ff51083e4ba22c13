"""The codec: round trips, and errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from freezer.codec import OMIT_DEFAULT, decode, encode, keyed_by, stored_as
from freezer.errors import IntegrityError


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A named range, which checks itself."""

    name: str
    low: int
    step: int = field(default=1, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError(f"low is {self.low}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The other member of a union."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Everything:
    """A field of every supported type."""

    kind: Literal["one", "two"] = "one"
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    ranges: tuple[Range, ...] = field(default=(), metadata=keyed_by("name"))
    parts: tuple[Range | Text, ...] = ()
    figures: Mapping[str, float | None] = field(default_factory=dict)
    nested: Everything | None = None
    num_threads: int = field(default=1, metadata=stored_as("threads"))
    free: Any = None


FULL = Everything(
    kind="two",
    ratio=0.5,
    interval=(1.0, 2.0),
    ranges=(Range(name="a", low=1), Range(name="b", low=2, step=3)),
    parts=(Text(text="x"), Range(name="c", low=0)),
    figures={"p50": 1.5, "p99": None},
    nested=Everything(num_threads=4),
    free={"any": ["thing"]},
)


def test_a_record_round_trips_through_json() -> None:
    data = json.loads(json.dumps(encode(FULL)))
    assert data == encode(FULL)
    assert data["ranges"] == {"a": {"low": 1}, "b": {"low": 2, "step": 3}}
    assert data["nested"]["threads"] == 4
    assert decode(Everything, data, origin="here") == FULL


def test_unknown_fields_are_ignored_and_missing_ones_default() -> None:
    assert decode(Everything, {"invented": 1, "kind": "two"}, origin="here") == Everything(
        kind="two"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the record is .*; expected an object"),
        ({"kind": "three"}, "field 'kind' is 'three'; expected one of 'one', 'two'"),
        ({"ratio": "fast"}, "field 'ratio' is 'fast'; expected float"),
        ({"interval": [1.0]}, "field 'interval' has 1 items; expected 2"),
        ({"parts": "text"}, "field 'parts' is 'text'; expected a list"),
        ({"parts": [{"text": 1}]}, r"field 'parts\.0\.text' is 1; expected str"),
        ({"ranges": {"a": {}}}, "field 'ranges.0' lacks 'low'"),
        ({"ranges": {"a": {"low": -1}}}, "low is -1"),
        (
            {"nested": {"nested": {"threads": None}}},
            r"field 'nested\.nested\.threads' is None; expected int",
        ),
    ],
)
def test_a_wrong_value_names_its_field(data: Any, message: str) -> None:
    with pytest.raises(IntegrityError, match=f"here: .*{message}"):
        decode(Everything, data, origin="here")
