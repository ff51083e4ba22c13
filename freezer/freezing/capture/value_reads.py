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

import functools
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from freezer.freezing.diagnostics.source_lines import running_at
from freezer.freezing.models import tensors_in

_READS = frozenset(
    (
        *(
            "__bool__",
            "__int__",
            "__float__",
            "__complex__",
            "__index__",
            "__contains__",
            "__array__",
            "__deepcopy__",
        ),
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    )
)
"""Attributes of a tensor that return its values.

Printing is not a read: nothing is computed from it.
"""

_MAKES = frozenset(("tensor", "as_tensor", "asarray"))
"""Functions that make a constant from numbers."""

_BY_SIZES = frozenset(("stride", "unbind"))
"""Functions that return numbers to Python, or a number of tensors, that depend on the sizes of
their first argument.
"""

_SIZES = frozenset(("size", "numel", "nelement", "stride", "__len__"))

_READING_OPERATORS = frozenset(("aten::_nested_tensor_from_mask_left_aligned",))
"""Operations that return values to Python without a function mode seeing it."""

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
    trace: Callable[[nn.Module, Sequence[Tensor]], Any],
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
        model, given = _Called(make()), [tensor.clone() for tensor in tensors]
        with warnings.catch_warnings(record=True) as caught, ExitStack() as modes:
            warnings.simplefilter("always")
            values = modes.enter_context(_Values(model, given, caught))
            if functions:
                modes.enter_context(_Functions(values))
            try:
                trace(model, given)
            except Exception:
                if (
                    not model.called
                ):  # otherwise only the discarded trace failed, because of the modes
                    raise
        for origin, line in values.reads():
            if line not in reads.setdefault(origin, []):
                reads[origin].append(line)
    return reads


def same_reads(model: nn.Module, example: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """A function that determines whether Python reads the same for tensors of other sizes as for an
    example.

    A trace on the meta device, which computes only sizes, returns what was read. While it is the
    same, so is Python's path.

    Args:
        model: a copy; it is moved to the meta device.
        example: on the meta device, as the tensors of the function. Their values must not be read.

    Returns:
        A function that returns False where it cannot tell.
    """
    program: Any = None

    def reads(tensors: Sequence[Tensor]) -> list[int | float | bool] | None:
        try:
            with torch.no_grad():
                return [tensor.item() for tensor in program(*tensors)]
        except Exception:  # the path of the example does not work for these sizes
            return None

    try:
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.jit.trace(_Reading(model.to("meta")), tuple(example), check_trace=False)
    except (
        Exception
    ):  # the model needs values, other devices, or an operation that the meta device lacks
        return lambda _: False
    expected = reads(example)
    return lambda tensors: expected is not None and reads(tensors) == expected


class _Reading(nn.Module):
    """Calls a model; returns the tensors that Python reads meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors in the order of reads."""
        read = _Collecting()
        with read:
            self.model(*tensors)
        return tuple(read.tensors)


class _Collecting(TorchFunctionMode):
    """Collects the tensors that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_read(func, args):
            self.tensors += tensors_in(args)
        if getattr(func, "__name__", "") in _BY_SIZES:
            self.tensors += args[0].shape
        return func(*args, **(kwargs or {}))


class _Called(nn.Module):
    """A model, and whether a call completed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.called = False

    def forward(self, *tensors: Tensor) -> Any:
        """The model's result."""
        result = self.model(*tensors)
        self.called = True
        return result


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
        self, model: nn.Module, inputs: Sequence[Tensor], caught: Sequence[warnings.WarningMessage]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._caught, self._num_seen = caught, 0
        self._values: defaultdict[object, int] = defaultdict(int)
        """Origins of the values of tensors, as bits, by `_key`."""
        self._sizes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._scalar = 0
        """Origins of a number just taken out of a tensor, for the next operation."""
        self._state: dict[object, int] = {}
        """The bit of each tensor of the model, by `_key`."""
        self._changed = 0
        self._noted: list[tuple[int, str]] = []
        bit = _FIRST_STATE
        for _, tensor in (*model.named_buffers(), *model.named_parameters()):
            self._state[_key(tensor)] = self._state.get(_key(tensor), 0) | bit
            bit <<= 1
        for tensor in inputs:
            self._values[_key(tensor)] |= _INPUTS

    def reads(self) -> Iterator[tuple[str, str]]:
        """The reads so far: origin in words, and the user's line."""
        for origin, wanted in (
            (INPUTS, _INPUTS),
            (STATE, self._changed),
            (RANDOM, _RANDOM),
            (OF_SIZES, _SIZE),
        ):
            yield from ((origin, line) for bits, line in self._noted if bits & wanted)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note that the current line reads values of tensors."""
        self.note_read(_any(self._of(tensor) for tensor in tensors))

    def note_read(self, origins: int) -> None:
        """Note that the current line reads values of some origins."""
        if origins:
            self._noted.append((origins, running_at() or "a line of torch"))

    def note_sizes(self, tensor: Tensor, sizes: Iterable[Tensor]) -> None:
        """Note that numbers are sizes of a tensor, with the origins of its sizes."""
        for size in sizes:
            self._values[_key(size)] |= self._sizes.get(tensor, 0) or _SIZE

    def _of(self, tensor: Tensor) -> int:
        return self._values.get(_key(tensor), 0) | self._state.get(_key(tensor), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func._schema.name, list(tensors_in((args, tuple(kwargs.values()))))
        origins = _any(self._of(tensor) for tensor in given)
        if (name == _SCALAR and self._is_pythons()) or name in _READING_OPERATORS:
            self.note(given)
        result = func(*args, **kwargs)
        if name == _SCALAR:
            self._scalar |= origins
            return result
        sizes = _any(self._sizes.get(tensor, 0) for tensor in given)
        by_numbers = name == "aten::index" and not any(
            index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])
        )
        if (
            torch.Tag.dynamic_output_shape in func.tags and not by_numbers
        ):  # x[indices] is as long as the indices
            sizes |= origins
        origins, sizes, self._scalar = origins | self._scalar, sizes | self._scalar, 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins |= _RANDOM
        self._note_changes(func._schema, args, kwargs, origins)
        short = name.rpartition("::")[2]
        if short.endswith("_like") or short.startswith(
            "new_"
        ):  # takes only shape, dtype and device of its first tensor
            origins &= _RANDOM
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
        return any(str(item.message).startswith(_CONVERTED) for item in new)

    def _note_changes(self, schema: Any, args: Any, kwargs: Any, origins: int) -> None:
        """Give the tensors that an operation writes into the origins of all its arguments."""
        given = (
            dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        )
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(given.get(argument.name)):
                    self._changed |= self._state.get(_key(tensor), 0)
                    self._values[_key(tensor)] |= origins


class _Functions(TorchFunctionMode):
    """Reports Python's reads of tensors to the mode that follows values."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_read(func, args):
            self._values.note(tensors_in(args))
        name = getattr(func, "__name__", "")
        if name == "stride":
            self._values.note_read(_SIZE)
        result = func(*args, **(kwargs or {}))
        if name in _SIZES or isinstance(result, torch.Size):
            self._values.note_sizes(args[0], tensors_in(result))
        return result


def _is_read(func: Any, args: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _READS or (name in _MAKES and bool(args) and not isinstance(args[0], Tensor))


def _any(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)
