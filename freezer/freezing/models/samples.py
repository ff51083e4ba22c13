"""Inputs of a source model: the spec that examples show, ranges of integers, and samples as input
sets that cover all points.

The range of an integer input comes from the lengths of the tables that the model indexes with it:
the eager model runs once under a dispatch mode, which follows values that come unchanged from an
input (views, casts, copies) up to the weights that they index. Arithmetic is not followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from freezer.errors import SpecError
from freezer.freezing.models.calls import SourceCall, described
from freezer.runtime.input_sets import (
    InputSet,
    generate,
    generate_at,
    is_mask,
    needs_range,
    range_is_needed,
    resize,
    tried_points,
)
from freezer.spec import (
    INTEGRAL,
    ConstantSpec,
    Dim,
    Header,
    InputItem,
    InputSpec,
    NestedSpec,
    TensorSpec,
    match_headers,
)

_OF_SELF = (
    *(
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
    ),
    *("t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    *(
        "_to_copy",
        "clone",
        "constant_pad_nd",
        "flip",
        "gather",
        "index",
        "index_select",
        "lift_fresh",
        "lift_fresh_copy",
    ),
    *("masked_fill", "masked_fill_", "masked_select", "repeat", "roll"),
)

_KEEPS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_SELF, ("self",)),
    "cat": ("tensors",),
    "stack": ("tensors",),
    "copy_": ("src",),
    "where": ("self", "other"),
}
"""Operations whose results hold only values of these arguments, besides fill values of the model.
"""

_EMBEDDINGS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")

ExampleInputs = Mapping[str, Any] | Sequence[Any] | Tensor
"""Inputs by parameter name, or positional: one tensor or a sequence.

Values may be nested in tuples, lists and dicts.
"""

Dims = Mapping[str, Mapping[int, Dim]]
"""Dims that may vary, by input path and axis: `{"x": {0: Dim(name="batch", min=1, max=16)}}`."""


def example_spec(example_inputs: ExampleInputs, dims: Dims) -> tuple[InputSpec, dict[str, Tensor]]:
    """Infer the input spec from example inputs.

    Returns:
        The spec, and the example's tensors by path: one sample set.

    Raises:
        SpecError: a value is neither a tensor, a plain constant, nor a tuple, list or dict of
            these; or `dims` names an unknown input or axis.
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
            raise SpecError(
                f"dims: unknown tensor input {path!r}; expected one of {', '.join(example)}"
            )
    used: dict[str, Dim] = {}
    for dim in (dim for path in example for dim in dims.get(path, {}).values()):
        if used.setdefault(dim.name, dim) != dim:
            raise SpecError(
                f"dims: {dim.name!r} has two different bounds; use the same bounds for all inputs"
            )
    return (
        InputSpec(
            inputs=items, dims=tuple(used.values()), style="keyword" if keyword else "positional"
        ),
        example,
    )


def _item(path: str, value: Any, dims: Dims, example: dict[str, Tensor]) -> InputItem:
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
        kind = (
            "quantized"
            if tensor.is_quantized
            else "nested"
            if tensor.is_nested
            else str(tensor.layout)
        )
        raise SpecError(
            f"input {name!r}: got a {kind} tensor, expected a dense one; give .to_dense(), or pass"
            " its parts as separate inputs and combine them in forward"
        )
    for axis in dims:
        if not 0 <= axis < tensor.dim():
            raise SpecError(
                f"dims: input {name!r} has no axis {axis}; expected 0 to {tensor.dim() - 1}"
            )
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(
        dims[axis].name if axis in dims else size for axis, size in enumerate(tensor.shape)
    )
    plain = TensorSpec(name=name, dtype=dtype, shape=shape)
    if dtype not in INTEGRAL or dtype == "bool" or tensor.numel() == 0:
        return plain
    low, high = int(tensor.min()), int(tensor.max())
    return plain if is_mask(plain) and low >= 0 and high <= 1 else replace(plain, range=(low, high))


def match_samples(sets: Sequence[Mapping[str, Tensor]], spec: InputSpec) -> list[InputSet]:
    """Samples as input sets.

    Raises:
        SpecError: names, dtypes, shapes or sizes differ from the spec; code CP-SAMPLES.
    """

    def header(tensor: Tensor) -> Header:
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)

    points = match_headers(
        [{name: header(tensor) for name, tensor in tensors.items()} for tensors in sets], spec
    )
    return [
        InputSet(
            point=point,
            tensors={item.name: tensors[item.name].contiguous() for item in spec.tensors},
        )
        for point, tensors in zip(points, sets, strict=True)
    ]


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
    covered = [dict(item.point) for item in samples]
    missing = [point for point in tried_points(spec) if point not in covered] if samples else []
    sets = [
        *samples,
        *(
            resize(samples[index % len(samples)], spec, point)
            for index, point in enumerate(missing)
        ),
    ]
    if fill_up or not samples:
        sets += generate(spec)
    named, held = [dict(point) for point in points], [dict(item.point) for item in sets]
    missing = [point for point in named if point not in held]
    if all(point in named for point in held):
        ranges = product(*(dim.sizes for dim in spec.dims))
        every = (dict(zip((dim.name for dim in spec.dims), sizes, strict=True)) for sizes in ranges)
        missing += [point for point in islice(every, len(named) + 1) if point not in named][:1]
    own = list(sets)
    for index, point in enumerate(missing):
        sets.append(
            resize(own[index % len(own)], spec, point)
            if samples
            else generate_at(spec, point, seed=len(own) + index)
        )
    return sets


def with_found_ranges(name: str, model: nn.Module, spec: InputSpec) -> InputSpec:
    """The spec with ranges for integer inputs that had none: valid indices of the tables that the
    eager model indexes with them.

    Raises:
        SpecError: an input indexes no table, or the model fails on values within the range.
    """
    wanted = [item for item in spec.tensors if needs_range(item)]
    if not wanted:
        return spec
    zeros = generate_at(
        spec.with_ranges({item.name: (0, 0) for item in wanted}), spec.first_point(), seed=0
    ).tensors
    watch, source = (
        _Watch({item.name: zeros[item.name] for item in wanted}),
        SourceCall(name, model),
    )
    problem = ""
    try:
        with watch:
            source(spec, zeros)
    except Exception as error:  # lengths seen before are still valid
        problem = f"with zeros the model fails: {described(error)}"
    found = {
        item.name: (
            0,
            min(watch.lengths[item.name] - 1, torch.iinfo(getattr(torch, item.dtype)).max),
        )
        for item in wanted
        if watch.lengths.get(item.name, 0) > 0
    }
    for item in wanted:
        if item.name not in found:
            raise range_is_needed(
                item, f"; {problem or 'the model indexes none of its tables with it'}"
            )
    spec = spec.with_ranges(found)
    if problem:
        return spec  # the first call reports it
    source = SourceCall(name, model)
    for generated in generate(spec):
        try:
            source(spec, generated.tensors)
        except Exception as error:
            ranges = ", ".join(f"{path!r}: {list(bounds)}" for path, bounds in found.items())
            raise SpecError(
                f"{name}: the tables that the model indexes allow {ranges}, but the model fails on"
                f" such values at {dict(generated.point)}: {described(error)}; declare `range:"
                " [low, high]` for them, or give samples"
            ) from error
    return spec


class _Watch(TorchDispatchMode):
    """Follows the inputs' values through all operations.

    A tensor that is neither an input nor the result of an operation is a weight, or a constant of
    the model.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.lengths: dict[str, int] = {}
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each input and result, the inputs whose values it holds."""
        for name, tensor in inputs.items():
            self._origins[tensor] = frozenset([name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        name = schema.name.rpartition("::")[2]
        for table, dim, index in _lookups(name, given):
            if table not in self._origins:
                for origin in self._origins.get(index, ()):
                    self.lengths[origin] = min(
                        self.lengths.get(origin, table.shape[dim]), table.shape[dim]
                    )
        self._follow(name, given, result)
        return result

    def _follow(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        sources = [
            tensor
            for argument in _KEEPS.get(name, ())
            for tensor in tensors_in(given.get(argument))
        ]
        if name in _KEEPS and not any(source in self._origins for source in sources):
            return  # a view or copy of a weight counts as the weight
        origins: frozenset[str] = frozenset().union(
            *(self._origins.get(source, ()) for source in sources)
        )
        for tensor in tensors_in(result):
            self._origins[tensor] = frozenset() if tensor.dtype is torch.bool else origins


def _lookups(name: str, given: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, Tensor]]:
    """The tables that an operation indexes, with dim and indices."""
    if name in _EMBEDDINGS:
        yield given["weight"], 0, given["indices"]
    elif name in ("index_select", "gather") and given["self"].dim() > 0:
        yield given["self"], given["dim"], given["index"]
    elif name == "index" and not any(
        index is not None and index.dtype is torch.bool for index in given["indices"]
    ):
        yield from (
            (given["self"], dim, index)
            for dim, index in enumerate(given["indices"])
            if index is not None
        )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operation."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def arguments_of(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object] | None
) -> dict[str, object]:
    """The arguments of an operation's call by name."""
    names = [formal.name for formal in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}
