"""Run a model in float64 even where it asks for a narrower dtype itself; the float64 reference runs
in this mode.

`.double()` only converts weights, buffers and inputs. Many models cast inside: Llama's norms
compute in `x.to(torch.float32)`, T5's attention uses `softmax(..., dtype=torch.float32)`. Their
rounding errors would be attributed to eager.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freezer.freezing.models import Kwargs
from freezer.runtime.tensors import program_tensors, tensors_in

_DOUBLE = (torch.float64, torch.complex128)
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""The last operator of torch.tensor: a view by its schema, but of a new tensor."""


def own_dtype(
    model: nn.Module,
    inputs: Iterable[torch.dtype],
) -> torch.dtype:
    """The least precise floating dtype of a model's weights, buffers and inputs; without any,
    torch's default.
    """
    dtypes = (*inputs, *(tensor.dtype for tensor in program_tensors(model)))
    real = [each.to_real() for each in dtypes if each.is_floating_point or each.is_complex]
    return max(real, key=_eps, default=torch.get_default_dtype())


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype.to_real()).eps


class Widening(TorchDispatchMode):
    """Replace the model's own precision, and any higher one, by float64 in tensors and requested
    dtypes.

    A request for less than the model's own precision is part of the model and stays: a float32
    model that rounds to bfloat16 rounds in the reference too.

    Attributes:
        narrow: an operator that returned the model's own precision nevertheless, or wrote into such
            a tensor, and the dtype; None if the whole model ran in float64.
    """

    supports_higher_order_operators = True

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow: str | None = None
        self._wide = {dtype: wide for dtype, wide in _WIDE.items() if _eps(dtype) <= _eps(own)}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Kwargs = None,
    ) -> Any:
        """Run an operator in float64."""
        named = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):  # higher-order, such as torch.cond
            operands, functions = pytree.tree_map(self._within, (list(args), named))
            return func(*operands, **functions)
        schema = func._schema
        written = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        aliases = any(result.alias_info is not None for result in schema.returns)
        aliases &= schema.name not in _FRESH
        if aliases and not written:
            with self:  # `x.to(dtype)` may be a view, and is not decomposed yet
                parts = func.decompose(*args, **named)
            return func(*args, **named) if parts is NotImplemented else parts
        names = [argument.name for argument in schema.arguments[: len(args)]]
        given = dict(zip(names, args, strict=True)) | named
        for name in given.keys() - written:
            given[name] = pytree.tree_map(self.widen, given[name])
        result = func(*(given[name] for name in names), **{name: given[name] for name in named})
        if not _dtypes(given).isdisjoint(_DOUBLE):
            for dtype in _dtypes(result) & self._wide.keys():
                self.narrow = f"{schema.name} gives {dtype}"
        return result if aliases else pytree.tree_map(self.widen, result)

    def widen(self, value: Any) -> Any:
        """Widen a tensor or a dtype; return any other value unchanged."""
        if isinstance(value, torch.dtype):
            return self._wide.get(value, value)
        if isinstance(value, Tensor) and value.dtype in self._wide:
            return value.to(self._wide[value.dtype])
        return value

    def _within(self, value: Any) -> Any:
        """Wrap a function to run in this mode; return any other value unchanged."""
        if not callable(value) or isinstance(value, Tensor):
            return value

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return within

    def widen_attributes(self, model: nn.Module) -> None:
        """Widen tensors that are plain attributes, which `.double()` skips."""
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            attributes = vars(module)
            for name, value in attributes.items():
                if isinstance(value, Tensor):
                    attributes[name] = self.widen(value)


@contextmanager
def widening(mode: Widening | None) -> Iterator[None]:
    """Run in the mode, if given, without torch.compile, which torch.cond uses.

    Otherwise torch.compile would remember that it could not compile the code in this mode, and fail
    on it later outside the mode.
    """
    stance = nullcontext()
    if mode is not None and "torch._dynamo" in sys.modules:  # the eager model ran before
        stance = torch.compiler.set_stance("force_eager")
    with stance, mode or nullcontext():
        yield


def _dtypes(values: Any) -> set[torch.dtype]:
    """The dtypes of all tensors among values."""
    return {tensor.dtype for tensor in tensors_in(values)}
