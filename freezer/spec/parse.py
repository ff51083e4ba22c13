"""Parse declarations of inputs and dims from catalogs and the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freezer.errors import SpecError, expected_names
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import ConstantSpec, InputItem, NestedSpec, TensorSpec, check_range


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
    keyword = isinstance(inputs, Mapping)
    named = (
        list(inputs.items())
        if isinstance(inputs, Mapping)
        else [(f"input_{i}", item) for i, item in enumerate(inputs)]
    )
    bounds = tuple(declared_dim(name, bound) for name, bound in dims.items())
    items = tuple(declared_item(str(name), item, positional=not keyword) for name, item in named)
    return InputSpec(inputs=items, dims=bounds, style="keyword" if keyword else "positional")


def declared_dim(name: str, bound: Mapping[str, int]) -> Dim:
    """Parse the bounds of one dim; see `declared_spec`."""
    _check_fields(f"dim {name!r}", bound, {"min", "max", "multiple_of"}, required="max")
    if not all(type(value) is int for value in bound.values()):
        raise SpecError(f"dim {name!r}: got {dict(bound)}, expected whole numbers")
    step = bound.get("multiple_of", 1)
    return Dim(name=name, min=bound.get("min", step), max=bound["max"], multiple_of=step)


def declared_item(name: str, item: Any, *, positional: bool = False) -> InputItem:
    """Parse one input or a part of one; see `declared_spec`."""
    form = next(
        (
            key
            for key in ("value", "tuple", "list", "dict")
            if isinstance(item, Mapping) and key in item
        ),
        "shape",
    )
    allowed = {"shape", "dtype", "range"} if form == "shape" else {form}
    _check_fields(
        f"input {name!r}", item, allowed | ({"name"} if positional else set()), required=form
    )
    name = str(item.get("name", name))
    if form == "value":
        value = item["value"]
        if value is not None and not isinstance(value, bool | int | float | str):
            raise SpecError(
                f"input {name!r}: got a value of type {type(value).__name__}, expected null, a"
                " number, a bool or a text"
            )
        return ConstantSpec(name=name, value=value)
    if form == "dict":
        return _declared_dict(name, item["dict"])
    if form in ("tuple", "list"):
        if not isinstance(item[form], list):
            raise SpecError(
                f"input {name!r}: got a {form} that is a {type(item[form]).__name__}, expected a"
                " list of inputs"
            )
        parts = tuple(
            declared_item(f"{name}.{index}", part) for index, part in enumerate(item[form])
        )
        return NestedSpec(name=name, kind="tuple" if form == "tuple" else "list", items=parts)
    return _declared_tensor(name, item)


def _declared_dict(name: str, given: Any) -> NestedSpec:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise SpecError(f"input {name!r}: got the dict {given!r}, expected inputs by text keys")
    parts = tuple(declared_item(f"{name}.{key}", part) for key, part in given.items())
    return NestedSpec(name=name, kind="dict", items=parts, keys=tuple(given))


def _declared_tensor(name: str, item: Mapping[str, Any]) -> TensorSpec:
    shape, low_high = item["shape"], item.get("range")
    if not isinstance(shape, list) or not all(type(size) in (int, str) for size in shape):
        raise SpecError(
            f"input {name!r}: got shape {shape!r}, expected a list of sizes and dim names"
        )
    if low_high is not None and not (
        isinstance(low_high, list)
        and len(low_high) == 2
        and all(type(x) in (int, float) for x in low_high)
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
        raise SpecError(
            f"{what}: got a {type(item).__name__}, expected a mapping with"
            f" {', '.join(sorted(allowed))}"
        )
    for key in item:
        if key not in allowed:
            raise SpecError(
                f"{what}: field {key!r} is unknown; {expected_names(str(key), sorted(allowed))}"
            )
    if required not in item:
        raise SpecError(f"{what}: field {required!r} is required")
