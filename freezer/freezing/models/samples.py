"""Inputs of a source model: the spec that examples show, and samples as input sets that cover all
points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Tensor

from freezer.errors import SpecError
from freezer.runtime.input_sets import (
    InputSet,
    generate,
    generate_at,
    is_mask,
    resize,
    tried_points,
)
from freezer.spec import (
    INTEGRAL,
    ConstantSpec,
    Dim,
    InputItem,
    InputSpec,
    NestedSpec,
    TensorSpec,
    match_headers,
)

ExampleInputs = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs by parameter name, or positional: one tensor or a sequence.

Values may be nested in tuples, lists and dicts.
"""

Dims = Mapping[str, Mapping[int, Dim]]
"""Dims that may vary, by input path and axis: `{"x": {0: Dim(name="batch", min=1, max=16)}}`."""

Point = Mapping[str, int]


def example_spec(example_inputs: ExampleInputs, dims: Dims) -> tuple[InputSpec, dict[str, Tensor]]:
    """Infer the input spec from example inputs.

    Returns:
        The spec, and the example's tensors by path: one sample set.

    Raises:
        SpecError: a value is neither a tensor, a plain constant, nor a tuple, list or dict of
            these; or `dims` names an unknown input or axis.
    """
    if isinstance(example_inputs, Mapping):
        values = dict(example_inputs)
    else:
        several = [example_inputs] if isinstance(example_inputs, Tensor) else example_inputs
        values = {f"input_{index}": value for index, value in enumerate(several)}
    example: dict[str, Tensor] = {}
    items = tuple(_item(path, value, dims, example) for path, value in values.items())
    used: dict[str, Dim] = {}
    for path in dims:
        if path not in example:
            raise SpecError(
                f"dims: unknown tensor input {path!r}; expected one of {', '.join(example)}"
            )
    for path in example:
        for dim in dims.get(path, {}).values():
            if used.setdefault(dim.name, dim) != dim:
                raise SpecError(
                    f"dims: {dim.name!r} has two different bounds; use the same bounds for all"
                    " inputs"
                )
    style: Literal["keyword", "positional"] = (
        "keyword" if isinstance(example_inputs, Mapping) else "positional"
    )
    return InputSpec(inputs=items, dims=tuple(used.values()), style=style), example


def _item(path: str, value: object, dims: Dims, example: dict[str, Tensor]) -> InputItem:
    """Describe one example value, and add its tensors to `example` by path."""
    if isinstance(value, Tensor):
        example[path] = value
        return _tensor_spec(path, value, dims.get(path, {}))
    if value is None or isinstance(value, bool | int | float | str):
        return ConstantSpec(name=path, value=value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = tuple(_item(f"{path}.{key}", part, dims, example) for key, part in value.items())
        return NestedSpec(name=path, kind="dict", items=parts, keys=tuple(value))
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        parts = tuple(
            _item(f"{path}.{index}", part, dims, example) for index, part in enumerate(value)
        )
        return NestedSpec(
            name=path, kind="tuple" if isinstance(value, tuple) else "list", items=parts
        )
    raise SpecError(
        f"input {path!r}: got a {type(value).__name__}, expected a tensor, a plain constant, or a"
        " tuple, list or dict of these with string keys"
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
    dtype = _dtype(tensor)
    plain = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    if dtype not in INTEGRAL or dtype == "bool" or tensor.numel() == 0:
        return plain
    low, high = int(tensor.min()), int(tensor.max())
    return plain if is_mask(plain) and low >= 0 and high <= 1 else replace(plain, range=(low, high))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def match_samples(sets: Sequence[Mapping[str, Tensor]], spec: InputSpec) -> list[InputSet]:
    """Samples as input sets.

    Raises:
        SpecError: names, dtypes, shapes or sizes differ from the spec; code CP-SAMPLES.
    """
    headers = []
    for tensors in sets:
        headers.append({name: (_dtype(x), tuple(x.shape)) for name, x in tensors.items()})
    matched = []
    for point, tensors in zip(match_headers(headers, spec), sets, strict=True):
        ordered = {item.name: tensors[item.name].contiguous() for item in spec.tensors}
        matched.append(InputSet(point=point, tensors=ordered))
    return matched


def input_sets(
    samples: Sequence[InputSet],
    spec: InputSpec,
    points: Sequence[Mapping[str, int]],
    *,
    fill_up: bool,
) -> list[InputSet]:
    """Input sets at all points of `tried_points`, and at points with payloads of their own.

    If all sets are at such points, one at other sizes is added, for the payload of all sizes.

    Args:
        samples: real input sets; where they lack a point, one of them is cut or repeated to its
            sizes. Without any, sets are generated.
        spec: the input spec.
        points: points with payloads of their own.
        fill_up: add generated sets to the samples.
    """
    covered = [dict(sample.point) for sample in samples]
    missing = [point for point in tried_points(spec) if point not in covered] if samples else []
    sets = [*samples, *_resized(samples, spec, missing)]
    if fill_up or not samples:
        sets += generate(spec)
    covered = [dict(input_set.point) for input_set in sets]
    named = [dict(point) for point in points]
    missing = [point for point in named if point not in covered]
    if all(point in named for point in covered):
        missing += _another_point(spec, named)
    if samples:
        return [*sets, *_resized(sets, spec, missing)]
    first = len(sets)
    further = [generate_at(spec, point, seed=first + index) for index, point in enumerate(missing)]
    return [*sets, *further]


def _resized(sets: Sequence[InputSet], spec: InputSpec, points: Sequence[Point]) -> list[InputSet]:
    """Sets at other points, each from one of some sets in turn."""
    return [resize(sets[index % len(sets)], spec, point) for index, point in enumerate(points)]


def _another_point(spec: InputSpec, points: Sequence[Point]) -> list[dict[str, int]]:
    """A declared point that is not among some; empty if there is none."""
    names = [dim.name for dim in spec.dims]
    every = product(*(dim.sizes for dim in spec.dims))
    candidates = [dict(zip(names, sizes, strict=True)) for sizes in islice(every, len(points) + 1)]
    return [point for point in candidates if point not in points][:1]
