"""Parse declarations of inputs and dims from catalogs and the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from freezer.errors import SpecError, expected_names
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import (
    INTEGRAL,
    ConstantSpec,
    InputItem,
    NestedSpec,
    TensorSpec,
    check_range,
)


def declared_spec(
    inputs: Mapping[str, Any] | list[Any], dims: Mapping[str, Mapping[str, int]]
) -> InputSpec:
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
    items: list[InputItem] = []
    if isinstance(inputs, Mapping):
        for name, given in inputs.items():
            items.append(declared_item(str(name), given))
        return InputSpec(inputs=tuple(items), dims=bounds)
    for index, given in enumerate(inputs):
        items.append(declared_item(f"input_{index}", given, positional=True))
    return InputSpec(inputs=tuple(items), dims=bounds, style="positional")


def declared_dim(name: str, bound: Mapping[str, int]) -> Dim:
    """Parse the bounds of one dim; see `declared_spec`."""
    place = f"dim {name!r}"
    _check_fields(place, bound, {"min", "max", "multiple_of"}, required="max")
    for value in bound.values():
        if type(value) is not int:
            raise SpecError(f"{place}: got {value!r}, expected a whole number")
    step = bound.get("multiple_of", 1)
    least = bound.get("min", step)
    return Dim(name=name, min=least, max=bound["max"], multiple_of=step)


def declared_item(
    name: str,
    item: Any,
    *,
    positional: bool = False,
) -> InputItem:
    """Parse one input or a part of one; see `declared_spec`."""
    form, allowed = "shape", {"shape", "dtype", "range", "relation"}
    for key in ("value", "tuple", "list", "dict"):
        if isinstance(item, Mapping) and key in item:
            form, allowed = key, {key}
            break
    if positional:
        allowed.add("name")
    _check_fields(f"input {name!r}", item, allowed, required=form)
    name = str(item.get("name", name))
    if form == "shape":
        return _declared_tensor(name, item)
    if form == "value":
        return _declared_constant(name, item["value"])
    return _declared_nested(name, form, item[form])


def _declared_constant(name: str, value: Any) -> ConstantSpec:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise SpecError(
            f"input {name!r}: got a value of type {type(value).__name__}, expected null, a"
            " number, a bool or a text"
        )
    return ConstantSpec(name=name, value=value)


def _declared_nested(
    name: str,
    form: str,
    given: Any,
) -> NestedSpec:
    is_dict = form == "dict"
    fits = isinstance(given, Mapping) if is_dict else isinstance(given, list)
    if not fits:
        raise SpecError(
            f"input {name!r}: got a {form} that is a {type(given).__name__}, expected a"
            f" {'mapping' if is_dict else 'list'} of inputs"
        )
    pairs: Iterable[tuple[Any, Any]] = given.items() if is_dict else enumerate(given)
    parts: list[InputItem] = []
    for key, part in pairs:
        if is_dict and not isinstance(key, str):
            raise SpecError(f"input {name!r}: got the key {key!r}, expected a text")
        parts.append(declared_item(f"{name}.{key}", part))
    items = tuple(parts)
    if is_dict:
        return NestedSpec(name=name, kind="dict", items=items, keys=tuple(given))
    if form == "list":
        return NestedSpec(name=name, kind="list", items=items)
    return NestedSpec(name=name, kind="tuple", items=items)


def _declared_tensor(name: str, item: Mapping[str, Any]) -> TensorSpec:
    shape, bounds = item["shape"], item.get("range")
    if not _is_list_of(shape, int, str):
        raise SpecError(
            f"input {name!r}: got shape {shape!r}, expected a list of sizes and dim names"
        )
    low_high = None
    if bounds is not None:
        if not _is_list_of(bounds, int, float) or len(bounds) != 2:
            raise SpecError(f"input {name!r}: got range {bounds!r}, expected [low, high]")
        low_high = (bounds[0], bounds[1])
    dtype = str(item.get("dtype", "float32"))
    relation = item.get("relation")
    if relation not in (None, "below", "sorted") or (relation and dtype not in INTEGRAL):
        raise SpecError(
            f"input {name!r}: got relation {relation!r} of {dtype}, expected 'below' or 'sorted' of"
            " integers"
        )
    tensor = TensorSpec(
        name=name, dtype=dtype, shape=tuple(shape), range=low_high, relation=relation
    )
    check_range(tensor)
    return tensor


def _is_list_of(value: object, *kinds: type) -> bool:
    """Whether a value is a list of exactly these types; a bool is not an int here."""
    return isinstance(value, list) and all(type(part) in kinds for part in value)


def _check_fields(
    place: str,
    item: Any,
    allowed: set[str],
    *,
    required: str,
) -> None:
    names = sorted(allowed)
    if not isinstance(item, Mapping):
        got = type(item).__name__
        raise SpecError(f"{place}: got a {got}, expected a mapping with {', '.join(names)}")
    for key in item:
        if key not in allowed:
            expected = expected_names(str(key), names)
            raise SpecError(f"{place}: field {key!r} is unknown; {expected}")
    if required not in item:
        raise SpecError(f"{place}: field {required!r} is required")
