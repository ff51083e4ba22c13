"""What input and output contracts consist of: tensors, constants, and structures of them; results
rebuilt by their structure. Imports no torch.

An item of an input contract is a tensor, a constant, or a tuple, list or dict of items. Items are
named by their path: `x`, `state.0`, `opts.scale`. Tensors and constants are leaves; flat payloads
and files of samples contain the leaves only, in order.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from dataclasses import replace as replaced
from typing import Any, Literal

from freezer.codec import OMIT_DEFAULT, frozen, written_if
from freezer.errors import ContractError, SpecError, expected_names

FLOATING = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGRAL = ("bool", "uint8", "int8", "int16", "int32", "int64")
DTYPES = (*FLOATING, *COMPLEX, *INTEGRAL)

Sizes = dict[str, int]
Point = Mapping[str, int]
"""Sizes of all named dims: `{"batch": 4}`."""

Bounds = tuple[float, float]
"""Minimum and maximum."""

_BOUNDS: Mapping[str, Bounds] = {
    "bool": (0, 1),
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
"""Minimum and maximum of each dtype of integers."""

PlainValue = bool | int | float | str | None

_LEAVES = ("tensor", "constant")
_WITH_KEYS = ("dict", "named", "namedtuple")


Relation = Literal["below", "sorted"]
"""How integers depend on other inputs; see TensorSpec."""


@frozen
class TensorSpec:
    """One input tensor.

    Attributes:
        name: its path, from a parameter of `forward` or a generated name for positional inputs.
        dtype: one of DTYPES.
        shape: ints and dim names.
        range: inclusive bounds of generated values; None: by dtype.
        indices: inclusive bounds of the indices of a table that the model looks the values up in;
            a call with others is refused.
        relation: of integers: `below` keeps generated and resized values below the sizes of the
            other inputs, such as edges of a graph; `sorted` also lets them ascend from 0, such as
            offsets. None: independent of other inputs.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    range: Bounds | None = field(default=None, metadata=OMIT_DEFAULT)
    indices: tuple[int, int] | None = field(default=None, metadata=OMIT_DEFAULT)
    relation: Relation | None = field(default=None, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        place = f"input {self.name!r}"
        if self.dtype not in DTYPES:
            expected = expected_names(self.dtype, DTYPES)
            raise SpecError(f"{place}: dtype {self.dtype!r} is unknown; {expected}")
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise SpecError(
                    f"{place}: got size {size}, expected 0 or more, or the name of a dim"
                )
        if self.range is not None:
            low, high = self.range
            if not low <= high:
                raise SpecError(f"{place}: got range [{low}, {high}], expected low <= high")

    def at(self, point: Point) -> tuple[int, ...]:
        """The concrete shape at a point."""
        return tuple(size if isinstance(size, int) else point[size] for size in self.shape)


@frozen
class ConstantSpec:
    """An input that is not a tensor; it becomes part of the artifact."""

    name: str
    value: PlainValue

    def __post_init__(self) -> None:
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise SpecError(
                f"input {self.name!r}: got the constant {self.value}, which JSON cannot represent;"
                " make it part of the model"
            )


@frozen
class NestedSpec:
    """An input that is a tuple, list or dict of items.

    Attributes:
        name: its path.
        kind: passed to the source model; frozen models accept lists and tuples for each other.
        items: its parts in order, named by their paths.
        keys: of a dict, in the order of `items`.
    """

    name: str
    kind: Literal["tuple", "list", "dict"]
    items: tuple[InputItem, ...]
    keys: tuple[str, ...] = field(
        default=(), metadata=written_if(lambda nested: nested.kind == "dict")
    )


def check_range(tensor: TensorSpec) -> None:
    """Check a declared range of integers against the dtype.

    Raises:
        SpecError: the dtype is not ordered, or cannot represent a bound.
    """
    if tensor.range is None or tensor.dtype in FLOATING:
        return
    if tensor.dtype in COMPLEX:
        raise SpecError(f"input {tensor.name!r}: {tensor.dtype} has no ranges; remove the range")
    least, greatest = _BOUNDS[tensor.dtype]
    for bound in tensor.range:
        if not least <= bound <= greatest or not float(bound).is_integer():
            raise SpecError(
                f"input {tensor.name!r}: got a range to {bound}, expected whole numbers from"
                f" {least} to {greatest} ({tensor.dtype})"
            )


InputItem = TensorSpec | ConstantSpec | NestedSpec


def walk(item: InputItem) -> Iterator[InputItem]:
    """The item and its parts, in preorder."""
    yield item
    if isinstance(item, NestedSpec):
        for part in item.items:
            yield from walk(part)


def with_tensors(item: InputItem, change: Callable[[TensorSpec], TensorSpec]) -> InputItem:
    """The item with every tensor replaced by `change` of it."""
    if isinstance(item, TensorSpec):
        return change(item)
    if isinstance(item, ConstantSpec):
        return item
    return replaced(item, items=tuple(with_tensors(part, change) for part in item.items))


def put_together(
    item: InputItem,
    leaves: Mapping[str, Any],
) -> Any:
    """Build the argument of the source model for an item, from tensors by path."""
    if isinstance(item, TensorSpec):
        return leaves[item.name]
    if isinstance(item, ConstantSpec):
        return item.value
    parts = [put_together(part, leaves) for part in item.items]
    if item.kind == "dict":
        return dict(zip(item.keys, parts, strict=True))
    return tuple(parts) if item.kind == "tuple" else parts


def take_apart(item: InputItem, value: Any) -> Iterator[tuple[str, Any]]:
    """Split the argument for an item into leaves by path. Missing keys of dicts are skipped, and
    leaves are not checked.

    Raises:
        ContractError: a part is not the expected tuple, list or dict, or has another length or
            unknown keys.
    """
    if not isinstance(item, NestedSpec):
        yield item.name, value
        return
    if item.kind == "dict":
        keys: Sequence[object] = item.keys
        fits = isinstance(value, Mapping) and set(keys).issuperset(value)
        expected = f"a dict with {', '.join(item.keys)}"
    else:
        keys = range(len(item.items))
        fits = isinstance(value, tuple | list) and len(value) == len(keys)
        expected = f"a {item.kind} of {len(keys)}"
    if not fits:
        parts = f" with {list(value)}" if isinstance(value, Mapping) else ""
        raise ContractError(
            f"input {item.name!r}: got a {type(value).__name__}{parts}, expected {expected}"
        )
    for key, part in zip(keys, item.items, strict=True):
        if item.kind != "dict" or key in value:
            yield from take_apart(part, value[key])


@frozen
class OutputSpec:
    """One output tensor, named by its path in the result: `logits`, `0`, `hidden.1`; `output` for a
    single tensor.
    """

    name: str
    dtype: str
    rank: int


@frozen
class OutputStructure:
    """How to rebuild the result from the flat output tensors.

    Attributes:
        kind: `tensor` (a leaf), `constant` (another leaf), `tuple`, `list`, `dict`, `namedtuple`,
            or `named` (a dataclass or ModelOutput, whose attributes, keys and order are kept, but
            not its type).
        keys: of a dict or a named structure.
        items: the parts, in order.
        value: of a constant.
        type_name: of a named structure, for people.
    """

    kind: Literal["tensor", "constant", "tuple", "list", "dict", "named", "namedtuple"]
    keys: tuple[str, ...] = field(
        default=(), metadata=written_if(lambda self: self.kind in _WITH_KEYS)
    )
    items: tuple[OutputStructure, ...] = field(
        default=(), metadata=written_if(lambda self: self.kind not in _LEAVES)
    )
    value: PlainValue = field(
        default=None, metadata=written_if(lambda self: self.kind == "constant")
    )
    type_name: str = field(default="", metadata=OMIT_DEFAULT)

    @property
    def num_tensors(self) -> int:
        """Number of leaves that are tensors."""
        return (self.kind == "tensor") + sum(item.num_tensors for item in self.items)


class NamedOutput(dict[str, Any]):
    """Result in place of the source's dataclass or ModelOutput: access by key, attribute and
    position.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self)}") from None

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return list(self.values())[key]
        return super().__getitem__(key)


def unflatten(
    structure: OutputStructure,
    leaves: Iterable[object],
) -> Any:
    """Rebuild the result from its leaves in order; a named structure becomes a NamedOutput."""
    remaining = iter(leaves)
    if structure.kind == "tensor":
        return next(remaining)
    if structure.kind == "constant":
        return structure.value
    items = [unflatten(item, remaining) for item in structure.items]
    if structure.kind == "list":
        return items
    if structure.kind == "tuple":
        return tuple(items)
    if structure.kind == "namedtuple":
        name = structure.type_name.rpartition(".")[2]
        return _named_tuple(name, structure.keys)(*items)
    fields = zip(structure.keys, items, strict=True)
    return dict(fields) if structure.kind == "dict" else NamedOutput(fields)


@functools.cache
def _named_tuple(
    name: str,
    keys: tuple[str, ...],
) -> Callable[..., tuple[object, ...]]:
    return namedtuple(name, keys)
