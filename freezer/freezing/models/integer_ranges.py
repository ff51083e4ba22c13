"""Ranges of integer inputs, from the lengths of the tables that a model indexes with them.

The eager model runs once under a dispatch mode, which follows values that come unchanged from an
input (views, casts, copies) up to the weights that they index. Arithmetic is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from freezer.freezing.models.calls import SourceCall, described
from freezer.runtime.input_sets import generate_at, needs_range, range_is_needed
from freezer.spec import InputSpec

Args = tuple[object, ...]
Kwargs = Mapping[str, object] | None

_OF_SELF = re.compile(
    "alias|as_strided|detach|diagonal|expand|permute|select|slice|split|split_with_sizes|squeeze|t"
    "|transpose|unbind|unfold|unsqueeze|view|_reshape_alias|_unsafe_view|_to_copy|clone"
    "|constant_pad_nd|flip|gather|index|index_select|lift_fresh|lift_fresh_copy|masked_fill"
    "|masked_fill_|masked_select|repeat|roll"
)
"""Operations whose results hold only values of their first argument, besides fill values of the
model.
"""

_OF_OTHERS = {
    "cat": ("tensors",),
    "stack": ("tensors",),
    "copy_": ("src",),
    "where": ("self", "other"),
}
"""The same for other arguments."""

_SELECTIONS = ("index_select", "gather")
_EMBEDDINGS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")


def with_found_ranges(name: str, model: nn.Module, spec: InputSpec) -> InputSpec:
    """The spec with ranges for integer inputs that had none: valid indices of the tables that the
    eager model indexes with them.

    Raises:
        SpecError: an input indexes no table.
    """
    wanted = list(filter(needs_range, spec.tensors))
    if not wanted:
        return spec
    names = [tensor.name for tensor in wanted]
    zero_spec = spec.with_ranges(dict.fromkeys(names, (0, 0)))
    zeros = generate_at(zero_spec, spec.first_point(), seed=0).tensors
    watch = _Watch({name: zeros[name] for name in names})
    source = SourceCall(name, model)
    problem = "the model indexes none of its tables with it"
    try:
        with watch:
            source(spec, zeros)
    except Exception as error:  # lengths seen before are still valid
        problem = f"with zeros the model fails: {described(error)}"
    ranges: dict[str, tuple[float, float]] = {}
    for tensor in wanted:
        length = watch.lengths.get(tensor.name, 0)
        if not length:
            raise range_is_needed(tensor, f"; {problem}")
        most = torch.iinfo(getattr(torch, tensor.dtype)).max
        ranges[tensor.name] = (0, min(length - 1, most))
    return spec.with_ranges(ranges)


class _Watch(TorchDispatchMode):
    """Follows the inputs' values through all operations.

    A tensor that is neither an input nor the result of an operation is a weight, or a constant of
    the model.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.lengths: dict[str, int] = {}
        """Length of the shortest table by input."""
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each input and result, the inputs whose values it holds."""
        for name, tensor in inputs.items():
            self._origins[tensor] = frozenset([name])

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        arguments = arguments_of(func, args, kwargs)
        _, _, name = func._schema.name.rpartition("::")
        for length, index in self._lookups(name, arguments):
            for origin in self._origins.get(index, ()):
                shortest = self.lengths.get(origin, length)
                self.lengths[origin] = min(shortest, length)
        self._follow(name, arguments, result)
        return result

    def _follow(self, name: str, arguments: Mapping[str, object], result: object) -> None:
        names = _OF_OTHERS.get(name, ())
        if _OF_SELF.fullmatch(name):
            names = ("self",)
        values = [arguments.get(each) for each in names]
        sources = tensors_in(values)
        known = [self._origins[source] for source in sources if source in self._origins]
        if names and not known:
            return  # a view or copy of a weight counts as the weight
        none: frozenset[str] = frozenset()
        origins = none.union(*known)
        for tensor in tensors_in(result):
            self._origins[tensor] = origins
            if tensor.dtype is torch.bool:
                self._origins[tensor] = none

    def _lookups(self, name: str, arguments: Mapping[str, object]) -> Iterator[tuple[int, Tensor]]:
        """The lengths of the weights that an operation indexes, with the indices."""
        given = cast(Mapping[str, Tensor], arguments)
        looks_up = name in _EMBEDDINGS
        table = given.get("weight" if looks_up else "self")
        if table is None or table in self._origins:
            return
        if looks_up:
            yield table.shape[0], given["indices"]
        elif name in _SELECTIONS and table.dim() > 0:
            dim = cast(int, arguments["dim"])
            yield table.shape[dim], given["index"]
        elif name == "index":
            indices = cast(list[Tensor | None], arguments["indices"])
            tensors = tensors_in(indices)
            if any(tensor.dtype is torch.bool for tensor in tensors):
                return
            for length, index in zip(table.shape, indices, strict=False):
                if index is not None:
                    yield length, index


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in arguments or results of an operation."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def arguments_of(func: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """The arguments of an operation's call by name."""
    names = [formal.name for formal in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}
