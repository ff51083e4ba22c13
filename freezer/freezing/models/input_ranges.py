"""Ranges of integer inputs, from the lengths of the tables that a model indexes with them.

The eager model runs once under a dispatch mode, which follows values that come unchanged from an input (views, casts, copies)
up to the weights that they index. Arithmetic is not followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from freezer.errors import SpecError
from freezer.freezing.models.calls import SourceCall, described
from freezer.runtime.input_sets import generate, generate_at, needs_range, range_is_needed
from freezer.spec.inputs import InputSpec

_OF_SELF = (
    *("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"),
    *("t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    *("_to_copy", "clone", "constant_pad_nd", "flip", "gather", "index", "index_select", "lift_fresh", "lift_fresh_copy"),
    *("masked_fill", "masked_fill_", "masked_select", "repeat", "roll"),
)

_KEEPS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_SELF, ("self",)),
    "cat": ("tensors",),
    "stack": ("tensors",),
    "copy_": ("src",),
    "where": ("self", "other"),
}
"""Operations whose results hold only values of these arguments, besides fill values of the model."""

_EMBEDDINGS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")


class _Watch(TorchDispatchMode):
    """Follows the inputs' values through all operations.

    A tensor that is neither an input nor the result of an operation is a weight, or a constant of the model.
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
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
        name = schema.name.rpartition("::")[2]
        for table, dim, index in _lookups(name, given):
            if table not in self._origins:
                for origin in self._origins.get(index, ()):
                    self.lengths[origin] = min(self.lengths.get(origin, table.shape[dim]), table.shape[dim])
        self._follow(name, given, result)
        return result

    def _follow(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        sources = [tensor for argument in _KEEPS.get(name, ()) for tensor in tensors_in(given.get(argument))]
        if name in _KEEPS and not any(source in self._origins for source in sources):
            return  # a view or copy of a weight counts as the weight
        origins: frozenset[str] = frozenset().union(*(self._origins.get(source, ()) for source in sources))
        for tensor in tensors_in(result):
            self._origins[tensor] = frozenset() if tensor.dtype is torch.bool else origins


def _lookups(name: str, given: Mapping[str, Any]) -> Iterator[tuple[Tensor, int, Tensor]]:
    """The tables that an operation indexes, with dim and indices."""
    if name in _EMBEDDINGS:
        yield given["weight"], 0, given["indices"]
    elif name in ("index_select", "gather") and given["self"].dim() > 0:
        yield given["self"], given["dim"], given["index"]
    elif name == "index" and not any(index is not None and index.dtype is torch.bool for index in given["indices"]):
        yield from ((given["self"], dim, index) for dim, index in enumerate(given["indices"]) if index is not None)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operation."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def with_found_ranges(name: str, model: nn.Module, spec: InputSpec) -> InputSpec:
    """The spec with ranges for integer inputs that had none: valid indices of the tables that the eager model indexes with them.

    Raises:
        SpecError: an input indexes no table, or the model fails on values within the range.
    """
    wanted = [item for item in spec.tensors if needs_range(item)]
    if not wanted:
        return spec
    zeros = generate_at(spec.with_ranges({item.name: (0, 0) for item in wanted}), spec.first_point(), seed=0).tensors
    watch, source = _Watch({item.name: zeros[item.name] for item in wanted}), SourceCall(name, model)
    problem = ""
    try:
        with watch:
            source(spec, zeros)
    except Exception as error:  # lengths seen before are still valid
        problem = f"with zeros the model fails: {described(error)}"
    found = {
        item.name: (0, min(watch.lengths[item.name] - 1, torch.iinfo(getattr(torch, item.dtype)).max))
        for item in wanted
        if watch.lengths.get(item.name, 0) > 0
    }
    for item in wanted:
        if item.name not in found:
            raise range_is_needed(item, f"; {problem or 'the model indexes none of its tables with it'}")
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
                f"{name}: the tables that the model indexes allow {ranges}, but the model fails on such values at "
                f"{dict(generated.point)}: {described(error)}; declare `range: [low, high]` for them, or give samples"
            ) from error
    return spec
