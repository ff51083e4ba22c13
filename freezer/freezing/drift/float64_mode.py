"""Run a model in float64 even where it asks for a narrower dtype itself; the float64 reference runs
in this mode.

`.double()` only converts weights, buffers and inputs. Many models cast inside: Llama's norms
compute in `x.to(torch.float32)`, T5's attention uses `softmax(..., dtype=torch.float32)`. Their
rounding errors would be attributed to eager.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freezer.compare.tensor_values import comparable

_DOUBLE = (torch.float64, torch.complex128)
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_Operators = defaultdict[torch.dtype, set[str]]
"""Names of operators by dtype."""

_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""The last operator of torch.tensor: a view by its schema, but of a new tensor."""


def own_dtype(
    model: nn.Module,
    inputs: Iterable[torch.dtype],
) -> torch.dtype:
    """The least precise floating dtype of a model's weights, buffers and inputs; without any,
    torch's default.
    """
    tensors = (*model.parameters(), *model.buffers())
    dtypes = {*(tensor.dtype for tensor in tensors), *inputs}
    real = [dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(
        real,
        key=_eps,
        default=torch.get_default_dtype(),
    )


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype.to_real()).eps


class Widening(TorchDispatchMode):
    """Replace the model's own precision, and any higher one, by float64 in tensors and requested
    dtypes.

    A request for less than the model's own precision is part of the model and stays: a float32
    model that rounds to bfloat16 rounds in the reference too.

    Attributes:
        own: the model's own floating dtype.
        widened: operators that requested a dtype and got float64, by dtype.
        kept: operators that rounded to less than the model's own precision, by dtype.
        narrow: operators that returned less than float64 nevertheless, or wrote into such a tensor,
            by dtype.
    """

    supports_higher_order_operators = True

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
        self._wide: dict[torch.dtype, torch.dtype] = {}
        for dtype, wide in _WIDE.items():
            if _eps(dtype) <= _eps(own):
                self._wide[dtype] = wide
        self.widened: _Operators = defaultdict(set)
        self.kept: _Operators = defaultdict(set)
        self.narrow: _Operators = defaultdict(set)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator in float64."""
        named = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):  # higher-order, such as torch.cond
            functions = {name: self._within(value) for name, value in named.items()}
            return func(
                *map(self._within, args),
                **functions,
            )
        schema = func._schema
        written = {argument.name for argument in schema.arguments if _is_written(argument)}
        aliases = any(result.alias_info is not None for result in schema.returns)
        aliases = aliases and schema.name not in _FRESH
        if aliases and not written:
            with self:  # `x.to(dtype)` may be a view, and is not decomposed yet
                parts = func.decompose(*args, **named)
            if parts is NotImplemented:
                return func(*args, **named)
            return parts
        names = [argument.name for argument in schema.arguments][: len(args)]
        given = {**dict(zip(names, args, strict=True)), **named}
        for name, value in given.items():
            if isinstance(value, torch.dtype) and value in self._wide:
                self.widened[value].add(_name(func))
            if name not in written:
                given[name] = pytree.tree_map(self.widen, value)
        operands = list(given.values())
        positional = [given.pop(name) for name in names]
        result = func(*positional, **given)
        self._record_narrow(func, operands, result)
        if aliases:
            return result
        return pytree.tree_map(self.widen, result)

    def widen(self, value: Any) -> Any:
        """Widen a tensor or a dtype; return any other value unchanged."""
        if isinstance(value, torch.dtype):
            return self._wide.get(value, value)
        if isinstance(value, Tensor):
            dtype = self._wide.get(value.dtype, value.dtype)
            return value.to(dtype)
        return value

    def _within(self, value: Any) -> Any:
        """Wrap a function to run in this mode; return any other value unchanged."""
        if not callable(value) or isinstance(value, Tensor):
            return value

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return within

    def _record_narrow(
        self,
        func: Any,
        operands: Sequence[Any],
        result: Any,
    ) -> None:
        """Record an operator that takes float64 and returns less."""
        if not any(tensor.dtype in _DOUBLE for tensor in _tensors(operands)):
            return
        for tensor in _tensors(result):
            if comparable(tensor) and tensor.dtype not in _DOUBLE:
                record = self.narrow if tensor.dtype in self._wide else self.kept
                record[tensor.dtype].add(_name(func))

    def widen_attributes(self, model: nn.Module) -> None:
        """Widen tensors that are plain attributes, which `.double()` skips."""
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    vars(module)[name] = self.widen(value)

    @property
    def why_not(self) -> str | None:
        """Why part of the model did not run in float64; None if all of it did."""
        if not self.narrow:
            return None
        return f"float64 does not run throughout: forward casts to {_listed(self.narrow)}"

    @property
    def note(self) -> str | None:
        """Which casts were widened, and which were kept; None without any."""
        notes = []
        if self.widened:
            notes.append(f"float64 where forward asks for {_listed(self.widened)}")
        if self.kept:
            notes.append(
                f"rounded to {_listed(self.kept)} as in forward, below the model's own {self.own}"
            )
        return "; ".join(notes) or None


@contextlib.contextmanager
def widening(mode: Widening) -> Iterator[None]:
    """Run in the mode, without torch.compile, which torch.cond uses.

    Otherwise torch.compile would remember that it could not compile the code in this mode, and fail
    on it later outside the mode.
    """
    compiles = "torch._dynamo" in sys.modules  # the eager model ran before
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), mode:
        yield


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _listed(operators: _Operators) -> str:
    parts = []
    for dtype, names in sorted(operators.items(), key=str):
        parts.append(f"{dtype} ({', '.join(sorted(names))})")
    return " and ".join(parts)
