"""A model run in float64, also where it asks for a narrower dtype itself: what the reference runs under.

`.double()` reaches weights, buffers and inputs alone. Many models cast inside: Llama's norms compute in `x.to(torch.float32)`, T5's
attention takes `softmax(..., dtype=torch.float32)`. Their rounding would be eager's own, under the name of float64.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64}

_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""What torch.tensor ends with: by its schema a view, but of a tensor that nobody else has."""


def own_dtype(model: nn.Module, inputs: Iterable[torch.dtype]) -> torch.dtype:
    """The least precise floating dtype of a model's weights, buffers and inputs; torch's default where they have none."""
    given = {*(tensor.dtype for tensor in (*model.parameters(), *model.buffers())), *inputs}
    real = [dtype.to_real() for dtype in given if dtype.is_floating_point or dtype.is_complex]
    return max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.get_default_dtype())


class Widening(TorchDispatchMode):
    """Gives float64 to whoever asks for the model's own precision or a higher one, and takes tensors of such for float64.

    A request for less than the model's own precision is part of the model, and stays: a model in float32 that rounds to bfloat16
    rounds in the reference too.

    Args:
        own: the model's own floating dtype.

    Attributes:
        own: as given.
        widened: by dtype, the operators that asked for it and were given float64.
        kept: by dtype, the operators that gave less than the model's own precision of more.
        narrow: by dtype, the operators that gave less than float64 all the same, or wrote into a tensor of less.
    """

    supports_higher_order_operators = True

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
        enough = [dtype for dtype in _FLOATING if torch.finfo(dtype).eps <= torch.finfo(own).eps]
        self._wide: Mapping[torch.dtype, torch.dtype] = {
            **dict.fromkeys(enough, torch.float64),
            **{_COMPLEX[dtype]: torch.complex128 for dtype in enough if dtype in _COMPLEX},
        }
        self.widened: dict[torch.dtype, set[str]] = {}
        self.kept: dict[torch.dtype, set[str]] = {}
        self.narrow: dict[torch.dtype, set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of an operator, in float64."""
        named = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):  # of a higher order: torch.cond calls one of two functions
            return func(*map(self._within, args), **{name: self._within(value) for name, value in named.items()})
        schema = func._schema
        written = {item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write}
        aliases = any(item.alias_info is not None for item in schema.returns) and schema.name not in _FRESH
        if aliases and not written:
            with self:  # below autograd, `x.to(dtype)` comes in one piece, and may be a view
                parts = func.decompose(*args, **named)
            return func(*args, **named) if parts is NotImplemented else parts  # a view shows what lies there
        names = [item.name for item in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **named}
        for dtype in (value for value in given.values() if isinstance(value, torch.dtype) and value in self._wide):
            self.widened.setdefault(dtype, set()).add(_name(func))
        given = {name: value if name in written else pytree.tree_map(self.widen, value) for name, value in given.items()}
        result = func(*(given[name] for name in names[: len(args)]), **{name: given[name] for name in named})
        self._look_at(func, given, result)
        return result if aliases else pytree.tree_map(self.widen, result)

    def widen(self, value: Any) -> Any:
        """A tensor in float64, or a request for it, of what is to be widened; anything else as it is."""
        if isinstance(value, Tensor) and value.dtype in self._wide:
            return value.to(self._wide[value.dtype])
        return self._wide.get(value, value) if isinstance(value, torch.dtype) else value

    def _within(self, value: Any) -> Any:
        """A function that runs under this mode too; anything else as it is."""
        if not callable(value) or isinstance(value, Tensor):
            return value

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return within

    def _look_at(self, func: Any, given: Mapping[str, Any], result: Any) -> None:
        """Take note of an operator that takes float64 and gives less."""
        if not any(tensor.dtype in (torch.float64, torch.complex128) for tensor in _tensors(list(given.values()))):
            return
        for tensor in _tensors(result):
            if tensor.dtype in self._wide:
                self.narrow.setdefault(tensor.dtype, set()).add(_name(func))
            elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in (torch.float64, torch.complex128):
                self.kept.setdefault(tensor.dtype, set()).add(_name(func))

    @property
    def why_not(self) -> str | None:
        """Why what ran was not in float64 throughout; None where it was."""
        return f"float64 does not run throughout: forward makes {_listed(self.narrow)} of it" if self.narrow else None

    @property
    def note(self) -> str | None:
        """What was done so that all ran in float64, and what was left; None where there is nothing to tell."""
        told = []
        if self.widened:
            told.append(f"given float64 where forward asks for {_listed(self.widened)}")
        if self.kept:
            told.append(f"rounded to {_listed(self.kept)} as forward does, which is less than the model's own {self.own}")
        return "; ".join(told) or None


@contextlib.contextmanager
def widening(mode: Widening) -> Iterator[None]:
    """Run under the mode; what forward gives to torch.compile, as torch.cond does, runs uncompiled.

    Else torch.compile would remember that it could not compile such code, and fail on it later, without the mode too.
    """
    compiles = "torch._dynamo" in sys.modules  # the eager model has run before
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), mode:
        yield


def widen_attributes(model: nn.Module, mode: Widening) -> None:
    """Widen the tensors that are plain attributes, which `.double()` leaves out: a state that forward writes into."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                vars(module)[name] = mode.widen(value)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _listed(found: Mapping[torch.dtype, set[str]]) -> str:
    return " and ".join(f"{dtype} ({', '.join(sorted(names))})" for dtype, names in sorted(found.items(), key=str))
