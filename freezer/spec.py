"""What a model takes and gives: names, dtypes and shapes with named, bounded dims. Pure data; imports no torch.

A shape is a tuple of positive ints and dim names: `("batch", 3, 224, 224)`. Every dim name is bound by a `Dim`.
The JSON form of each record (`to_json`, `from_json`) is part of the manifest's format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from freezer.errors import SpecError

FLOATING = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGRAL = ("bool", "uint8", "int8", "int16", "int32", "int64")
DTYPES = (*FLOATING, *COMPLEX, *INTEGRAL)

Point = Mapping[str, int]
"""A size for every named dim: `{"batch": 4}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A named dimension that may be anything from `min` to `max`, both included."""

    name: str
    min: int
    max: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"dim {self.name!r}: a dim's name must be an identifier")
        if not 1 <= self.min <= self.max:
            raise SpecError(f"dim {self.name!r}: got min {self.min}, max {self.max}; expected 1 <= min <= max")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input tensor.

    Attributes:
        name: parameter of `forward`, or a made-up name when inputs are positional.
        dtype: one of DTYPES.
        shape: ints and dim names.
        range: bounds of generated values, both included; None lets the dtype decide.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SpecError(f"input {self.name!r}: dtype {self.dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise SpecError(f"input {self.name!r}: got size {size}; expected a size of 0 or more, or a dim's name")
        if self.range is not None and not self.range[0] <= self.range[1]:
            raise SpecError(f"input {self.name!r}: got range {list(self.range)}; expected [low, high] with low <= high")

    def at(self, point: Point) -> tuple[int, ...]:
        """The concrete shape at a point."""
        return tuple(size if isinstance(size, int) else point[size] for size in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSpec:
    """An input that is no tensor; it is baked into the artifact."""

    name: str
    value: bool | int | float | str | None

    def __post_init__(self) -> None:
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise SpecError(
                f"input {self.name!r}: got the constant {self.value}, which a manifest cannot hold; bake it into the model"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """All inputs of a model, in the order of a call.

    Attributes:
        inputs: tensors and constants.
        dims: the named dims that the shapes use.
        style: how the source model is called; a frozen model accepts both ways.
    """

    inputs: tuple[TensorSpec | ConstantSpec, ...]
    dims: tuple[Dim, ...] = ()
    style: Literal["keyword", "positional"] = "keyword"

    def __post_init__(self) -> None:
        names = [item.name for item in self.inputs]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"input {name!r} is given twice")
        bound = [dim.name for dim in self.dims]
        for name in bound:
            if bound.count(name) > 1:
                raise SpecError(f"dim {name!r} is given twice")
        used = {size for item in self.tensors for size in item.shape if isinstance(size, str)}
        for item in self.tensors:
            for size in item.shape:
                if isinstance(size, str) and size not in bound:
                    raise SpecError(f"input {item.name!r}: dim {size!r} is unbound; add `{size}: {{min: 1, max: 8}}` to dims")
        for name in bound:
            if name not in used:
                raise SpecError(f"dim {name!r} is used by no input; remove it or name it in a shape")

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs that are tensors, in order."""
        return tuple(item for item in self.inputs if isinstance(item, TensorSpec))

    @property
    def constants(self) -> dict[str, Any]:
        """The inputs that are constants, by name."""
        return {item.name: item.value for item in self.inputs if isinstance(item, ConstantSpec)}

    def first_point(self) -> dict[str, int]:
        """The point that latency is judged at unless the entry names another: every dim at its least."""
        return {dim.name: dim.min for dim in self.dims}

    def points(self) -> Iterator[dict[str, int]]:
        """The corner points of all dims, then the middle; no point twice."""
        seen: set[tuple[int, ...]] = set()
        corners: Iterable[tuple[int, ...]] = product(*((dim.min, dim.max) for dim in self.dims))
        middle = tuple(max(dim.min, math.isqrt(dim.min * dim.max)) for dim in self.dims)
        for sizes in (*corners, middle):
            if sizes not in seen:
                seen.add(sizes)
                yield dict(zip((dim.name for dim in self.dims), sizes, strict=True))

    def at(self, point: Point) -> InputSpec:
        """The same inputs with every dim fixed to the point's sizes."""
        fixed = tuple(
            TensorSpec(name=i.name, dtype=i.dtype, shape=i.at(point), range=i.range) if isinstance(i, TensorSpec) else i
            for i in self.inputs
        )
        return InputSpec(inputs=fixed, style=self.style)

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of the spec."""
        return {
            "style": self.style,
            "dims": {dim.name: {"min": dim.min, "max": dim.max} for dim in self.dims},
            "inputs": [
                {"name": i.name, "dtype": i.dtype, "shape": list(i.shape), **({"range": list(i.range)} if i.range else {})}
                if isinstance(i, TensorSpec)
                else {"name": i.name, "value": i.value}
                for i in self.inputs
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InputSpec:
        """The spec that `to_json` wrote."""
        inputs: list[TensorSpec | ConstantSpec] = []
        for item in data["inputs"]:
            if "value" in item:
                inputs.append(ConstantSpec(name=item["name"], value=item["value"]))
                continue
            low_high = item.get("range")
            inputs.append(
                TensorSpec(
                    name=item["name"],
                    dtype=item["dtype"],
                    shape=tuple(item["shape"]),
                    range=(low_high[0], low_high[1]) if low_high else None,
                )
            )
        dims = tuple(Dim(name=name, min=bounds["min"], max=bounds["max"]) for name, bounds in data["dims"].items())
        return cls(inputs=tuple(inputs), dims=dims, style=data["style"])


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
        inputs: by parameter name, or a list when they are positional; each `{shape, dtype, range}` or `{value}`. A list's items may
            carry a `name`.
        dims: bounds by name: `{"batch": {"min": 1, "max": 16}}`; min is 1 by default.

    Raises:
        SpecError: an input or a dim is not of this form.
    """
    keyword = isinstance(inputs, Mapping)
    named = list(inputs.items()) if isinstance(inputs, Mapping) else [(f"input_{i}", item) for i, item in enumerate(inputs)]
    bounds = []
    for name, bound in dims.items():
        _check_fields(f"dim {name!r}", bound, {"min", "max"}, required="max")
        if not all(type(value) is int for value in bound.values()):
            raise SpecError(f"dim {name!r}: got {dict(bound)}, expected whole numbers")
        bounds.append(Dim(name=name, min=bound.get("min", 1), max=bound["max"]))
    items = tuple(_declared_input(str(name), item, positional=not keyword) for name, item in named)
    return InputSpec(inputs=items, dims=tuple(bounds), style="keyword" if keyword else "positional")


def _declared_input(name: str, item: Any, *, positional: bool) -> TensorSpec | ConstantSpec:
    constant = isinstance(item, Mapping) and "value" in item
    allowed = {"value"} if constant else {"shape", "dtype", "range"}
    _check_fields(f"input {name!r}", item, allowed | ({"name"} if positional else set()), required="value" if constant else "shape")
    name = str(item.get("name", name))
    if constant:
        value = item["value"]
        if value is not None and not isinstance(value, bool | int | float | str):
            raise SpecError(
                f"input {name!r}: got a value of type {type(value).__name__}, expected none, a number, a bool or a text"
            )
        return ConstantSpec(name=name, value=value)
    shape, low_high = item["shape"], item.get("range")
    if not isinstance(shape, list) or not all(type(size) in (int, str) for size in shape):
        raise SpecError(f"input {name!r}: got shape {shape!r}, expected a list of sizes and dim names")
    if low_high is not None and not (
        isinstance(low_high, list) and len(low_high) == 2 and all(type(x) in (int, float) for x in low_high)
    ):
        raise SpecError(f"input {name!r}: got range {low_high!r}, expected [low, high]")
    return TensorSpec(
        name=name,
        dtype=str(item.get("dtype", "float32")),
        shape=tuple(shape),
        range=(low_high[0], low_high[1]) if low_high else None,
    )


def _check_fields(what: str, item: Any, allowed: set[str], *, required: str) -> None:
    if not isinstance(item, Mapping):
        raise SpecError(f"{what}: got a {type(item).__name__}, expected a mapping with {', '.join(sorted(allowed))}")
    for key in item:
        if key not in allowed:
            raise SpecError(f"{what}: field {key!r} is unknown; expected {', '.join(sorted(allowed))}")
    if required not in item:
        raise SpecError(f"{what}: field {required!r} is required")
