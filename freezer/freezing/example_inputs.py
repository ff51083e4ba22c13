"""Infer an input spec from example inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from freezer.errors import SpecError
from freezer.freezing.models.samples import tensor_spec
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.items import ConstantSpec, InputItem, NestedSpec

ExampleInputs = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs by parameter name, or positional: one tensor or a sequence. Values may be nested in tuples, lists and dicts."""

Dims = Mapping[str, Mapping[int, Dim]]
"""Dims that may vary, by input path and axis: `{"x": {0: Dim(name="batch", min=1, max=16)}}`."""


def example_spec(example_inputs: ExampleInputs, dims: Dims) -> tuple[InputSpec, dict[str, Tensor]]:
    """Infer the input spec from example inputs.

    Returns:
        The spec, and the example's tensors by path: one sample set.

    Raises:
        SpecError: a value is neither a tensor, a plain constant, nor a tuple, list or dict of these; or `dims` names an unknown
            input or axis.
    """
    keyword = isinstance(example_inputs, Mapping)
    if isinstance(example_inputs, Mapping):
        values = dict(example_inputs)
    else:
        given = [example_inputs] if isinstance(example_inputs, Tensor) else list(example_inputs)
        values = {f"input_{index}": value for index, value in enumerate(given)}
    example: dict[str, Tensor] = {}
    items = tuple(_item(path, value, dims, example) for path, value in values.items())
    for path in dims:
        if path not in example:
            raise SpecError(f"dims: unknown tensor input {path!r}; expected one of {', '.join(example)}")
    used: dict[str, Dim] = {}
    for dim in (dim for path in example for dim in dims.get(path, {}).values()):
        if used.setdefault(dim.name, dim) != dim:
            raise SpecError(f"dims: {dim.name!r} has two different bounds; use the same bounds for all inputs")
    return InputSpec(inputs=items, dims=tuple(used.values()), style="keyword" if keyword else "positional"), example


def _item(path: str, value: Any, dims: Dims, example: dict[str, Tensor]) -> InputItem:
    """Describe one example value, and add its tensors to `example` by path."""
    if isinstance(value, Tensor):
        axes = dims.get(path, {})
        for axis in axes:
            if not 0 <= axis < value.dim():
                raise SpecError(f"dims: input {path!r} has no axis {axis}; expected 0 to {value.dim() - 1}")
        example[path] = value
        declared = tensor_spec(path, value)
        return replace(declared, shape=tuple(axes[axis].name if axis in axes else size for axis, size in enumerate(declared.shape)))
    if value is None or isinstance(value, bool | int | float | str):
        return ConstantSpec(name=path, value=value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = tuple(_item(f"{path}.{key}", part, dims, example) for key, part in value.items())
        return NestedSpec(name=path, kind="dict", items=parts, keys=tuple(value))
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        parts = tuple(_item(f"{path}.{index}", part, dims, example) for index, part in enumerate(value))
        return NestedSpec(name=path, kind="tuple" if isinstance(value, tuple) else "list", items=parts)
    raise SpecError(
        f"input {path!r}: got a {type(value).__name__}, expected a tensor, a plain constant, or a tuple, list or dict of these "
        "with string keys"
    )
