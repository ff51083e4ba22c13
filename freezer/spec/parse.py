"""Parse declarations of inputs and dims from catalogs and the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from freezer.codec import JsonView
from freezer.errors import SpecError, expected_names
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import (
    INTEGRAL,
    ConstantSpec,
    InputItem,
    NestedSpec,
    PlainValue,
    TensorSpec,
    check_range,
)

_FORMS: tuple[Literal["value", "tuple", "list", "dict"], ...] = ("value", "tuple", "list", "dict")
"""Keys of an input that is not a tensor."""


def declared_spec(inputs: JsonView | list[Any], dims: Mapping[str, Mapping[str, int]]) -> InputSpec:
    """Parse a declared spec.

    Args:
        inputs: by parameter name, or a list of positional inputs, whose items may have a `name`.
            Each is `{shape, dtype, range}`, `{value}`, or a nested `{tuple: [...]}`, `{list:
            [...]}` or `{dict: {key: ...}}`.
        dims: bounds by name: `{"batch": {"min": 1, "max": 16}, "height": {"max": 64, "multiple_of":
            8}}`; min defaults to the smallest possible.

    Raises:
        SpecError: an input or dim has another form.
    """
    bounds = tuple(declared_dim(name, bound) for name, bound in dims.items())
    named = isinstance(inputs, Mapping)
    given = dict(inputs) if named else {f"input_{i}": item for i, item in enumerate(inputs)}
    items = [declared_item(str(name), item, positional=not named) for name, item in given.items()]
    return InputSpec(
        inputs=tuple(items),
        dims=bounds,
        style="keyword" if named else "positional",
    )


def declared_dim(name: str, bound: Mapping[str, int]) -> Dim:
    """Parse the bounds of one dim; see `declared_spec`."""
    place = f"dim {name!r}"
    _check_fields(
        place,
        bound,
        ["max", "min", "multiple_of"],
        required="max",
    )
    for value in bound.values():
        if type(value) is not int:
            raise SpecError(f"{place}: got {value!r}, expected a whole number")
    step = bound.get("multiple_of", 1)
    return Dim(
        name=name,
        min=bound.get("min", step),
        max=bound["max"],
        multiple_of=step,
    )


def declared_item(name: str, item: Any, *, positional: bool = False) -> InputItem:
    """Parse one input or a part of one; see `declared_spec`."""
    form = next((key for key in _FORMS if isinstance(item, Mapping) and key in item), None)
    allowed: list[str] = [form] if form else ["dtype", "range", "relation", "shape"]
    if positional:
        allowed.append("name")
    _check_fields(
        f"input {name!r}",
        item,
        allowed,
        required=form or "shape",
    )
    name = str(item.get("name", name))
    if form is None:
        return _declared_tensor(name, item)
    if form != "value":
        return _declared_nested(name, form, item[form])
    value = item["value"]
    if not isinstance(value, PlainValue):
        got = type(value).__name__
        raise SpecError(
            f"input {name!r}: got a value of type {got}, expected null, a number, a bool or a text"
        )
    return ConstantSpec(
        name=name,
        value=value,
    )


def _declared_nested(name: str, kind: Literal["tuple", "list", "dict"], given: Any) -> NestedSpec:
    form = Mapping if kind == "dict" else list
    if not isinstance(given, form):
        got, expected = type(given).__name__, form.__name__.lower()
        raise SpecError(
            f"input {name!r}: got a {kind} that is a {got}, expected a {expected} of inputs"
        )
    keys = tuple(given) if kind == "dict" else ()
    for key in keys:
        if not isinstance(key, str):
            raise SpecError(f"input {name!r}: got the key {key!r}, expected a text")
    parts = dict(given if isinstance(given, Mapping) else enumerate(given))
    return NestedSpec(
        name=name,
        kind=kind,
        items=tuple(declared_item(f"{name}.{key}", part) for key, part in parts.items()),
        keys=keys,
    )


def _declared_tensor(name: str, item: JsonView) -> TensorSpec:
    shape, bounds = item["shape"], item.get("range")
    if not _is_list_of(shape, int, str):
        raise SpecError(
            f"input {name!r}: got shape {shape!r}, expected a list of sizes and dim names"
        )
    if bounds is not None and not (_is_list_of(bounds, int, float) and len(bounds) == 2):
        raise SpecError(f"input {name!r}: got range {bounds!r}, expected [low, high]")
    dtype = str(item.get("dtype", "float32"))
    relation = item.get("relation")
    if relation not in (None, "below", "sorted") or (relation and dtype not in INTEGRAL):
        raise SpecError(
            f"input {name!r}: got relation {relation!r} of {dtype}, expected 'below' or 'sorted' of"
            " integers"
        )
    tensor = TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        range=bounds and (bounds[0], bounds[1]),
        relation=relation,
    )
    check_range(tensor)
    return tensor


def _is_list_of(value: object, *kinds: type) -> bool:
    """Whether a value is a list of exactly these types; a bool is not an int here."""
    return isinstance(value, list) and all(type(part) in kinds for part in value)


def _check_fields(
    place: str,
    item: Any,
    allowed: list[str],
    *,
    required: str,
) -> None:
    if not isinstance(item, Mapping):
        got = type(item).__name__
        raise SpecError(f"{place}: got a {got}, expected a mapping with {', '.join(allowed)}")
    for key in item:
        if key not in allowed:
            expected = expected_names(str(key), allowed)
            raise SpecError(f"{place}: field {key!r} is unknown; {expected}")
    if required not in item:
        raise SpecError(f"{place}: field {required!r} is required")
