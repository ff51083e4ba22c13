"""Inputs of a source model: the spec that examples show, and samples as input sets that cover all
points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor

from freezer.errors import SpecError, expected_names
from freezer.freezing.models.calls import NamedTensors
from freezer.runtime.input_sets import (
    InputSet,
    generate,
    generate_at,
    is_mask,
    resize,
    tried_points,
)
from freezer.runtime.tensors import dtype_name
from freezer.spec import (
    INTEGRAL,
    ConstantSpec,
    Dim,
    InputItem,
    InputSpec,
    NestedSpec,
    PlainValue,
    Point,
    TensorSpec,
)

ExampleInputs = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs by parameter name, or positional: one tensor or a sequence.

Values may be nested in tuples, lists and dicts.
"""

Dims = Mapping[str, Mapping[int, Dim]]
"""Dims that may vary, by input path and axis: `{"x": {0: Dim(name="batch", min=1, max=16)}}`."""

Points = Sequence[Point]


def example_spec(example_inputs: ExampleInputs, dims: Dims) -> tuple[InputSpec, dict[str, Tensor]]:
    """Infer the input spec from example inputs.

    Returns:
        The spec, and the example's tensors by path: one sample set.

    Raises:
        SpecError: a value is neither a tensor, a plain constant, nor a tuple, list or dict of
            these; or `dims` names an unknown input or axis.
    """
    if isinstance(example_inputs, Tensor):
        example_inputs = [example_inputs]
    named = isinstance(example_inputs, Mapping)
    values = dict(example_inputs if named else enumerate(example_inputs))
    example: dict[str, Tensor] = {}
    items = []
    for key, value in values.items():
        path = str(key) if named else f"input_{key}"
        items.append(_item(path, value, dims, example))
    style: Literal["keyword", "positional"] = "keyword" if named else "positional"
    spec = InputSpec(
        inputs=tuple(items),
        dims=_used_dims(dims, example),
        style=style,
    )
    return spec, example


def _used_dims(dims: Dims, example: NamedTensors) -> tuple[Dim, ...]:
    """The dims in the order of the tensors."""
    for path in dims:
        if path not in example:
            expected = expected_names(path, example)
            raise SpecError(f"dims: unknown tensor input {path!r}; {expected}")
    used: dict[str, Dim] = {}
    for path in example:
        for dim in dims.get(path, {}).values():
            if used.setdefault(dim.name, dim) != dim:
                raise SpecError(
                    f"dims: {dim.name!r} has two different bounds; use the same bounds for all"
                    " inputs"
                )
    return tuple(used.values())


def _item(
    path: str,
    value: object,
    dims: Dims,
    example: dict[str, Tensor],
) -> InputItem:
    """Describe one example value, and add its tensors to `example` by path."""
    if isinstance(value, Tensor):
        example[path] = value
        return _tensor_spec(path, value, dims.get(path, {}))
    if isinstance(value, PlainValue):
        return ConstantSpec(name=path, value=value)
    kind: Literal["dict", "tuple", "list"]
    keys: tuple[str, ...] = ()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        kind = "dict"
        keys = tuple(value)
        parts = dict(value)
    elif isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        parts = dict(enumerate(value))
    else:
        raise SpecError(
            f"input {path!r}: got a {type(value).__name__}, expected a tensor, a plain constant, or"
            " a tuple, list or dict of these with string keys"
        )
    items = [_item(f"{path}.{key}", part, dims, example) for key, part in parts.items()]
    return NestedSpec(
        name=path,
        kind=kind,
        items=tuple(items),
        keys=keys,
    )


def _tensor_spec(name: str, tensor: Tensor, dims: Mapping[int, Dim]) -> TensorSpec:
    """The spec of one example tensor.

    Integers get the range of its values, except a mask of zeros and ones.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise SpecError(
            f"input {name!r}: got a tensor that is sparse, quantized or nested, expected a dense"
            " one; give .to_dense(), or pass its parts as separate inputs and combine them in"
            " forward"
        )
    shape: list[int | str] = list(tensor.shape)
    for axis, dim in dims.items():
        if not 0 <= axis < tensor.dim():
            raise SpecError(
                f"dims: input {name!r} has no axis {axis}; expected 0 to {tensor.dim() - 1}"
            )
        shape[axis] = dim.name
    spec = TensorSpec(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(shape),
    )
    if spec.dtype not in INTEGRAL or spec.dtype == "bool" or tensor.numel() == 0:
        return spec
    low, high = int(tensor.min()), int(tensor.max())
    if is_mask(spec) and low >= 0 and high <= 1:
        return spec
    return replace(spec, range=(low, high))


def input_sets(
    samples: Sequence[InputSet],
    spec: InputSpec,
    points: Points,
    *,
    fill_up: bool,
) -> list[InputSet]:
    """Input sets at all points of `tried_points`, and at points with payloads of their own.

    Args:
        samples: real input sets; where they lack a point, one of them is cut or repeated to its
            sizes. Without any, sets are generated.
        spec: the input spec.
        points: points with payloads of their own.
        fill_up: add generated sets to the samples.
    """
    sets = _resized(samples, spec, tried_points(spec)) if samples else []
    if fill_up or not samples:
        sets += generate(spec)
    if samples:
        return _resized(sets, spec, points)
    for point in _missing(points, sets):
        sets.append(generate_at(spec, point, seed=len(sets)))
    return sets


def _missing(points: Points, sets: Sequence[InputSet]) -> Points:
    """The points without an input set."""
    covered = [input_set.point for input_set in sets]
    return [point for point in points if point not in covered]


def _resized(sets: Sequence[InputSet], spec: InputSpec, points: Points) -> list[InputSet]:
    """The sets, and one at each point that lacks one, each from one of the sets in turn."""
    missing = _missing(points, sets)
    further = [resize(each, spec, point) for each, point in zip(cycle(sets), missing, strict=False)]
    return [*sets, *further]
