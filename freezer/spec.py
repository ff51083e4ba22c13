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
from typing import Any, Literal

from freezer.errors import SpecError
from freezer.input_items import (
    COMPLEX,
    DTYPES,
    FLOATING,
    INTEGRAL,
    ConstantSpec,
    InputItem,
    NestedSpec,
    Point,
    TensorSpec,
    check_range,
    item_from_json,
    item_to_json,
    walk,
    with_tensors,
)

__all__ = [
    "COMPLEX",
    "DTYPES",
    "FLOATING",
    "INTEGRAL",
    "ConstantSpec",
    "Dim",
    "InputItem",
    "InputSpec",
    "NestedSpec",
    "OutputSpec",
    "OutputStructure",
    "Point",
    "TensorSpec",
    "declared_spec",
]


MAX_CORNERS = 64
"""Corner points are taken one and all while there are no more: those of six dims that vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A named dimension that may be any multiple of `multiple_of` from `min` to `max`, both included."""

    name: str
    min: int
    max: int
    multiple_of: int = 1

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

    def to_json(self) -> dict[str, int]:
        """The manifest's form of the bounds."""
        return {"min": self.min, "max": self.max, **({"multiple_of": self.multiple_of} if self.multiple_of > 1 else {})}

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, int]) -> Dim:
        """The dim whose bounds `to_json` wrote."""
        return cls(name=name, min=data["min"], max=data["max"], multiple_of=data.get("multiple_of", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """All inputs of a model, in the order of a call.

    Attributes:
        inputs: tensors, constants, and tuples, lists and dicts of them.
        dims: the named dims that the shapes use.
        style: how the source model is called; a frozen model accepts both ways.
    """

    inputs: tuple[InputItem, ...]
    dims: tuple[Dim, ...] = ()
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

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of the spec."""
        return {
            "style": self.style,
            "dims": {dim.name: dim.to_json() for dim in self.dims},
            "inputs": [item_to_json(item) for item in self.inputs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InputSpec:
        """The spec that `to_json` wrote."""
        dims = tuple(Dim.from_json(name, bounds) for name, bounds in data["dims"].items())
        return cls(inputs=tuple(item_from_json(item) for item in data["inputs"]), dims=dims, style=data["style"])


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One output tensor, named by its path in the model's result (`logits`, `0`, `hidden.1`; `output` for a lone tensor)."""

    name: str
    dtype: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStructure:
    """How the flat output tensors are put together again.

    Attributes:
        kind: `tensor` (a leaf), `constant` (a leaf that is no tensor), `tuple`, `list`, `dict`, `namedtuple`, or `named` (a
            dataclass or ModelOutput: attributes, keys and order are kept, the type is not).
        keys: of a dict or a named structure.
        items: the parts, in order.
        value: of a constant.
        type_name: of a named structure, for people.
    """

    kind: Literal["tensor", "constant", "tuple", "list", "dict", "named", "namedtuple"]
    keys: tuple[str, ...] = ()
    items: tuple[OutputStructure, ...] = ()
    value: bool | int | float | str | None = None
    type_name: str = field(default="")

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of the structure."""
        data: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("dict", "named", "namedtuple"):
            data["keys"] = list(self.keys)
        if self.kind not in ("tensor", "constant"):
            data["items"] = [item.to_json() for item in self.items]
        if self.kind == "constant":
            data["value"] = self.value
        if self.type_name:
            data["type_name"] = self.type_name
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputStructure:
        """The structure that `to_json` wrote."""
        return cls(
            kind=data["kind"],
            keys=tuple(data.get("keys", ())),
            items=tuple(cls.from_json(item) for item in data.get("items", ())),
            value=data.get("value"),
            type_name=data.get("type_name", ""),
        )


def declared_spec(inputs: Mapping[str, Any] | list[Any], dims: Mapping[str, Mapping[str, int]]) -> InputSpec:
    """The spec that a catalog or a command line declares.

    Args:
        inputs: by parameter name, or a list when they are positional; each `{shape, dtype, range}`, `{value}`, or of such
            `{tuple: [...]}`, `{list: [...]}` or `{dict: {key: ...}}`. A list's items may carry a `name`.
        dims: bounds by name: `{"batch": {"min": 1, "max": 16}, "height": {"max": 64, "multiple_of": 8}}`; min is the least that
            may be by default.

    Raises:
        SpecError: an input or a dim is not of this form.
    """
    keyword = isinstance(inputs, Mapping)
    named = list(inputs.items()) if isinstance(inputs, Mapping) else [(f"input_{i}", item) for i, item in enumerate(inputs)]
    bounds = []
    for name, bound in dims.items():
        _check_fields(f"dim {name!r}", bound, {"min", "max", "multiple_of"}, required="max")
        if not all(type(value) is int for value in bound.values()):
            raise SpecError(f"dim {name!r}: got {dict(bound)}, expected whole numbers")
        step = bound.get("multiple_of", 1)
        bounds.append(Dim(name=name, min=bound.get("min", step), max=bound["max"], multiple_of=step))
    items = tuple(_declared_item(str(name), item, positional=not keyword) for name, item in named)
    return InputSpec(inputs=items, dims=tuple(bounds), style="keyword" if keyword else "positional")


def _declared_item(name: str, item: Any, *, positional: bool = False) -> InputItem:
    form = next((key for key in ("value", "tuple", "list", "dict") if isinstance(item, Mapping) and key in item), "shape")
    allowed = {"shape", "dtype", "range"} if form == "shape" else {form}
    _check_fields(f"input {name!r}", item, allowed | ({"name"} if positional else set()), required=form)
    name = str(item.get("name", name))
    if form == "value":
        value = item["value"]
        if value is not None and not isinstance(value, bool | int | float | str):
            raise SpecError(
                f"input {name!r}: got a value of type {type(value).__name__}, expected none, a number, a bool or a text"
            )
        return ConstantSpec(name=name, value=value)
    if form == "dict":
        return _declared_dict(name, item["dict"])
    if form in ("tuple", "list"):
        if not isinstance(item[form], list):
            raise SpecError(f"input {name!r}: got a {form} that is a {type(item[form]).__name__}, expected a list of inputs")
        parts = tuple(_declared_item(f"{name}.{index}", part) for index, part in enumerate(item[form]))
        return NestedSpec(name=name, kind="tuple" if form == "tuple" else "list", items=parts)
    return _declared_tensor(name, item)


def _declared_dict(name: str, given: Any) -> NestedSpec:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise SpecError(f"input {name!r}: got the dict {given!r}, expected inputs by keys that are texts")
    parts = tuple(_declared_item(f"{name}.{key}", part) for key, part in given.items())
    return NestedSpec(name=name, kind="dict", items=parts, keys=tuple(given))


def _declared_tensor(name: str, item: Mapping[str, Any]) -> TensorSpec:
    shape, low_high = item["shape"], item.get("range")
    if not isinstance(shape, list) or not all(type(size) in (int, str) for size in shape):
        raise SpecError(f"input {name!r}: got shape {shape!r}, expected a list of sizes and dim names")
    if low_high is not None and not (
        isinstance(low_high, list) and len(low_high) == 2 and all(type(x) in (int, float) for x in low_high)
    ):
        raise SpecError(f"input {name!r}: got range {low_high!r}, expected [low, high]")
    tensor = TensorSpec(
        name=name,
        dtype=str(item.get("dtype", "float32")),
        shape=tuple(shape),
        range=(low_high[0], low_high[1]) if low_high else None,
    )
    check_range(tensor)
    return tensor


def _check_fields(what: str, item: Any, allowed: set[str], *, required: str) -> None:
    if not isinstance(item, Mapping):
        raise SpecError(f"{what}: got a {type(item).__name__}, expected a mapping with {', '.join(sorted(allowed))}")
    for key in item:
        if key not in allowed:
            raise SpecError(f"{what}: field {key!r} is unknown; expected {', '.join(sorted(allowed))}")
    if required not in item:
        raise SpecError(f"{what}: field {required!r} is required")
