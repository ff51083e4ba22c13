"""Detect values of tensors that Python reads while a model is traced: branches, loops and numbers
that a trace keeps.

A trace is right for other inputs only if no such value comes from the inputs, from random numbers,
or from state that a call changes. Sizes are reported apart, except those of tensors whose shape
depends on values, which count as values.

The model is traced twice under modes that follow each operation: with a function mode, which sees
Python's reads, and without, since modules such as nn.TransformerEncoder take another path under it.
Modes may change a trace, so both traces are discarded.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from freezer.freezing.diagnostics import running_at
from freezer.freezing.models import Args, Kwargs, arguments_of
from freezer.runtime.tensors import program_tensors, tensors_in

_READS = re.compile(
    r"__(bool|int|float|complex|index|contains|array|deepcopy)__"
    r"|item|tolist|numpy|equal|allclose|is_nonzero"
)
"""Attributes of a tensor that return its values.

Printing is not a read: nothing is computed from it.
"""

_MAKES = frozenset(("tensor", "as_tensor", "asarray"))
"""Functions that make a constant from numbers."""

_SIZES = frozenset(("size", "numel", "nelement", "stride", "__len__"))

_READING_OPERATOR = "aten::_nested_tensor_from_mask_left_aligned"
"""An operation that returns values to Python without a function mode seeing it."""

_SCALAR = "aten::_local_scalar_dense"
_CONVERTED = "Converting a tensor to a Python"

INPUTS, STATE, RANDOM, OF_SIZES = (
    "its inputs",
    "state that a call changes",
    "random numbers",
    "sizes",
)
"""Origins of values, in words."""

_INPUTS, _RANDOM, _SIZE = 1, 2, 4
_FIRST_STATE = 8


def values_read(
    make: Callable[[], nn.Module],
    trace: Callable[[nn.Module, Sequence[Tensor]], object],
    tensors: Sequence[Tensor],
) -> dict[str, list[str]]:
    """Find the values that Python reads while a model is traced: by their origin, in words, the
    user's source lines in order.

    Args:
        make: makes the model in its initial state; called twice.
        trace: traces a model on tensors.
        tensors: the inputs; they are copied.
    """
    reads: dict[str, list[str]] = {}
    for functions in (True, False):
        model, completed = make(), list[object]()
        model.register_forward_hook(lambda *_, completed=completed: completed.append(1))
        inputs = [tensor.clone() for tensor in tensors]
        with warnings.catch_warnings(record=True, action="always") as caught, ExitStack() as modes:
            values = _Values(model, inputs, caught)
            modes.enter_context(values)
            if functions:
                modes.enter_context(_Functions(values))
            try:
                trace(model, inputs)
            except Exception:
                # after a whole call only the discarded trace failed, because of the modes
                if not completed:
                    raise
        for origin, line in values.reads():
            lines = reads.setdefault(origin, [])
            if line not in lines:
                lines.append(line)
    return reads


def _key(tensor: Tensor) -> object:
    """A weak reference to the storage that a tensor's views share; to the tensor itself if it has
    none, as sparse tensors.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return WeakIdRef(tensor)


class _Values(TorchDispatchMode):
    """Follows the origins of values, and of sizes that depend on values, through all operations,
    and notes reads.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        caught: Sequence[warnings.WarningMessage],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._caught = caught
        self._num_seen = 0
        self._values: defaultdict[object, int] = defaultdict(int)
        """Origins of the values of tensors, as bits, by `_key`."""
        self._sizes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._scalar = 0
        """Origins of a number just taken out of a tensor, for the next operation."""
        self._state: defaultdict[object, int] = defaultdict(int)
        """The bit of each tensor of the model, by `_key`."""
        self._changed = 0
        self._noted: list[tuple[int, str]] = []
        bit = _FIRST_STATE
        for tensor in program_tensors(model):
            self._state[_key(tensor)] |= bit
            bit <<= 1
        for tensor in inputs:
            self._values[_key(tensor)] |= _INPUTS

    def reads(self) -> list[tuple[str, str]]:
        """The reads so far: origin in words, and the user's line."""
        origins = {
            INPUTS: _INPUTS,
            STATE: self._changed,
            RANDOM: _RANDOM,
            OF_SIZES: _SIZE,
        }
        pairs = product(origins.items(), self._noted)
        return [(origin, line) for (origin, wanted), (bits, line) in pairs if bits & wanted]

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note that the current line reads values of tensors."""
        self.note_read(self._of_all(tensors))

    def note_read(self, origins: int) -> None:
        """Note that the current line reads values of some origins."""
        if origins:
            self._noted.append((origins, running_at() or "a line of torch"))

    def note_sizes(self, tensor: Tensor, sizes: Iterable[Tensor]) -> None:
        """Note that numbers are sizes of a tensor, with the origins of its sizes."""
        origins = self._sizes.get(tensor, 0) or _SIZE
        for size in sizes:
            self._values[_key(size)] |= origins

    def _of_all(self, tensors: Iterable[Tensor]) -> int:
        """The origins of the values of tensors."""
        origins = 0
        for tensor in tensors:
            key = _key(tensor)
            origins |= self._values.get(key, 0) | self._state.get(key, 0)
        return origins

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name
        inputs = tensors_in((args, kwargs))
        origins = self._of_all(inputs)
        goes_to_python = name == _SCALAR and self._is_pythons()
        if goes_to_python or name == _READING_OPERATOR:
            self.note_read(origins)
        result = func(*args, **kwargs)
        if name == _SCALAR:
            self._scalar |= origins
            return result
        sizes = self._scalar
        for tensor in inputs:
            sizes |= self._sizes.get(tensor, 0)
        if torch.Tag.dynamic_output_shape in func.tags and not _by_numbers(name, args):
            sizes |= origins
        origins |= self._scalar
        self._scalar = 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins |= _RANDOM
        self._note_changes(func, arguments_of(func, args, kwargs), origins)
        short = name.rpartition("::")[2]
        if short.endswith("_like") or short.startswith("new_"):
            origins &= _RANDOM  # takes only shape, dtype and device of its first tensor
        for tensor in tensors_in(result):
            self._values[_key(tensor)] |= origins
            if sizes:
                self._sizes[tensor] = sizes
        return result

    def _is_pythons(self) -> bool:
        """Whether the tracer just warned that a number goes to Python; otherwise a traced operation
        takes it.
        """
        new = self._caught[self._num_seen :]
        self._num_seen = len(self._caught)
        return any(str(warning.message).startswith(_CONVERTED) for warning in new)

    def _note_changes(
        self,
        func: OpOverload,
        arguments: Mapping[str, object],
        origins: int,
    ) -> None:
        """Give the tensors that an operation writes into the origins of all its arguments."""
        for formal in func._schema.arguments:
            alias = formal.alias_info
            if alias is None or not alias.is_write:
                continue
            for tensor in tensors_in(arguments.get(formal.name)):
                key = _key(tensor)
                self._changed |= self._state.get(key, 0)
                self._values[key] |= origins


def _by_numbers(name: str, args: Args) -> bool:
    """Whether an operation indexes by numbers, so that x[indices] is as long as the indices."""
    if name != "aten::index":
        return False
    return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


class _Functions(TorchFunctionMode):
    """Reports Python's reads of tensors to the mode that follows values."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        makes = name in _MAKES and not isinstance(first, Tensor)
        if _READS.fullmatch(name) or makes:
            self._values.note(tensors_in(args))
        if name == "stride":
            self._values.note_read(_SIZE)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Size) or name in _SIZES:
            self._values.note_sizes(cast(Tensor, first), tensors_in(result))
        return result
