"""Ranges of integer inputs, from the lengths of the tables that a model indexes with them.

The eager model runs once under a dispatch mode, which follows values that come unchanged from an
input (views, casts, copies) up to the weights that they index. Arithmetic is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from freezer.errors import described
from freezer.freezing.models.calls import NamedTensors, SourceCall
from freezer.runtime.input_sets import (
    InputSet,
    generate_at,
    is_mask,
    needs_range,
    range_is_needed,
)
from freezer.runtime.tensors import cloned, tensors_in
from freezer.spec import INTEGRAL, InputSpec, Relation, TensorSpec

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

_ALL_OF_SELF = re.compile(
    "alias|detach|expand|permute|squeeze|t|transpose|unsqueeze|view|_reshape_alias|_unsafe_view"
    "|_to_copy|clone|lift_fresh|lift_fresh_copy|flip|repeat|roll"
)
"""Those whose results hold every value of it."""

_OF_OTHERS = {
    "cat": ("tensors",),
    "stack": ("tensors",),
    "copy_": ("src",),
    "where": ("self", "other"),
}
"""The same for other arguments."""

_SELECTIONS = ("index_select", "gather")
_EMBEDDINGS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")


def with_found_ranges(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    sample: NamedTensors | None,
    *,
    generated: bool,
) -> InputSpec:
    """The spec with the valid indices of integer inputs that the eager model looks up in tables,
    which are also the ranges of those that have none.

    Args:
        name, model, spec: the model and its inputs.
        sample: real inputs, with which the model runs once; None: zeros.
        generated: whether inputs are generated, for which integers need a range.

    Raises:
        SpecError: values of an input must be generated, it has no range, and indexes no table.
    """
    integers = _integers(spec)
    if not integers:
        return spec
    wanted = [item.name for item in integers if needs_range(item)]
    if sample is None:

        def zero(item: TensorSpec) -> TensorSpec:
            return replace(item, range=(0, 0)) if item.name in wanted else item

        sample = generate_at(spec.each(zero), spec.first_point(), seed=0).tensors
    given = cloned(sample)
    watch = _Watch(given, wanted)
    problem = _watched(watch, SourceCall(name, model), spec, given)

    def found(item: TensorSpec) -> TensorSpec:
        bounds = item.range
        if generated and item.name in wanted:
            length = watch.lengths.get(item.name)
            if not length:
                raise range_is_needed(item, f"; {problem}")
            bounds = (0, min(length - 1, torch.iinfo(getattr(torch, item.dtype)).max))
        return replace(item, range=bounds, indices=watch.indices.get(item.name))

    return spec.each(found)


def _integers(spec: InputSpec) -> list[TensorSpec]:
    return [item for item in spec.tensors if item.dtype in INTEGRAL and item.dtype != "bool"]


def _watched(
    watch: _Watch,
    source: SourceCall,
    spec: InputSpec,
    given: NamedTensors,
) -> str:
    """Run the model under a watch; return why an input may index no table."""
    try:
        with watch:
            source(spec, given)
    except Exception as error:  # lengths seen before are still valid
        return f"with zeros the model fails: {described(error)}"
    return "the model indexes none of its tables with it"


def with_found_relations(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    sets_of: Callable[[InputSpec], list[InputSet]],
) -> InputSpec:
    """The spec with relations of integer inputs with which eager takes generated and resized sets;
    unchanged if it takes them as they are, or with no relation.

    Args:
        name, model, spec: the model and its inputs.
        sets_of: makes the sets that a spec generates.
    """
    names = [item.name for item in _integers(spec) if not is_mask(item)]
    if not names or _takes(name, model, spec, sets_of(spec)):
        return spec
    relations: tuple[Relation, ...] = ("below", "sorted")
    for few in (*([each] for each in names), names):
        for relation in relations:
            related = _related(spec, few, relation)
            if _takes(name, model, related, sets_of(related)):
                return related
    return spec


def _related(spec: InputSpec, names: Sequence[str], relation: Relation) -> InputSpec:
    def change(item: TensorSpec) -> TensorSpec:
        return replace(item, relation=relation) if item.name in names else item

    return spec.each(change)


def _takes(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    sets: Sequence[InputSet],
) -> bool:
    """Whether the eager model runs on all sets."""
    source = SourceCall(name, model)
    try:
        for inputs in sets:
            source(spec, inputs.cloned())
    except Exception:  # of the user's model
        return False
    return True


class _Watch(TorchDispatchMode):
    """Follows the inputs' values through all operations.

    A tensor that is neither an input nor the result of an operation is a weight, or a constant of
    the model.
    """

    def __init__(self, inputs: NamedTensors, wanted: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.lengths: dict[str, int] = {}
        """Length of the shortest table by input."""
        self.indices: dict[str, tuple[int, int]] = {}
        """Indices that every lookup takes, of the inputs whose every value is looked up."""
        self._whole: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each input and result, the input whose every value it holds."""
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each wanted input and each result, the wanted inputs whose values it holds."""
        for name, tensor in inputs.items():
            self._whole[tensor] = name
            if name in wanted:
                self._origins[tensor] = frozenset([name])

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        arguments = arguments_of(func, args, kwargs)
        _, _, name = func._schema.name.rpartition("::")
        for length, index, table in self._lookups(name, arguments):
            for origin in self._origins.get(index, ()):
                self.lengths[origin] = min(self.lengths.get(origin, length), length)
            if index in self._whole and table not in self._whole:  # whose sizes may vary
                low, high = self.indices.get(self._whole[index], (-length, length - 1))
                least = -length if name == "index" else 0
                self.indices[self._whole[index]] = (max(low, least), min(high, length - 1))
        self._follow(name, arguments, result)
        return result

    def _follow(
        self,
        name: str,
        arguments: Mapping[str, object],
        result: object,
    ) -> None:
        source = arguments.get("self")
        if isinstance(source, Tensor) and source in self._whole and _ALL_OF_SELF.fullmatch(name):
            changed = cast(Tensor, result)
            if changed.dtype is not torch.bool:
                self._whole[changed] = self._whole[source]
        names = ("self",) if _OF_SELF.fullmatch(name) else _OF_OTHERS.get(name, ())
        sources = tensors_in([arguments.get(each) for each in names])
        known = [self._origins[source] for source in sources if source in self._origins]
        if names and not known:
            return  # a view or copy of a weight counts as the weight
        for tensor in tensors_in(result):
            origins = [] if tensor.dtype is torch.bool else known
            self._origins[tensor] = frozenset().union(*origins)

    def _lookups(
        self, name: str, arguments: Mapping[str, Any]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The lengths of the weights that an operation indexes, with the indices and the weight."""
        table = arguments.get("weight" if name in _EMBEDDINGS else "self")
        pairs: Iterable[tuple[int, Tensor | None]] = ()
        if table is None or table in self._origins:
            return
        if name in _EMBEDDINGS:
            pairs = [(table.shape[0], arguments["indices"])]
        elif name in _SELECTIONS and table.dim() > 0:
            pairs = [(table.shape[arguments["dim"]], arguments["index"])]
        elif name == "index":
            pairs = list(zip(table.shape, arguments["indices"], strict=False))
        lookups = [(length, index, table) for length, index in pairs if index is not None]
        if not any(index.dtype is torch.bool for _, index, _ in lookups):
            yield from lookups


def arguments_of(func: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """The arguments of an operation's call by name."""
    names = [formal.name for formal in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}
