"""Preserved attributes and methods of a frozen model: get, set and call them; refuse the other
methods of nn.Module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from freezer.errors import ContractError, NotPreservedError, last_line
from freezer.runtime.devices import CPU, current
from freezer.runtime.torch_settings import full_on_gpu, threads

REFUSED_NAMES = frozenset(
    name
    for name, member in vars(torch.nn.Module).items()
    if callable(member) and not name.startswith("_") and name not in ("eval", "extra_repr")
)
"""Methods of nn.Module that a frozen model does not have."""

_REMEDY = (
    "its graph is compiled and its weights are constants: call the model itself, load the artifact"
    " of another device class (`freezer.load(..., device_class=...)`), or change the source model"
    " and freeze it again, with `preserve: [name]` to keep attributes and methods"
)


class Preserved:
    """Preserved attributes and methods of one payload by name: `preserved["sub.version"]`,
    `preserved["reset"]()`.

    A tensor attribute is the payload's own: modifying it changes the state. Other values are
    copies: to change a list, set the whole list. Methods take and return the same as in the source,
    without gradients.

    Args:
        names: attributes, methods, and attributes of submodules (`sub.version`).
        module: of the payload.
        num_threads: for methods; None for the process's own.
        device: of the payload; on a GPU methods compute in full precision.

    Raises:
        NotPreservedError: the payload lacks one of the names.
    """

    def __init__(
        self,
        names: Sequence[str],
        module: Any,
        num_threads: int | None,
        device: torch.device = CPU,
    ) -> None:
        self._names = tuple(names)
        self._module = module
        self._num_threads = num_threads
        self._device = device
        for name in self._names:
            owner, last = self._owner(name)
            if not hasattr(owner, last):
                raise NotPreservedError(
                    f"{name!r} should be preserved, but the payload lacks it; freeze the model"
                    " again"
                )

    def __getitem__(self, name: str) -> Any:
        """The value of an attribute, or a method to call."""
        value = self._value(name)
        if not _is_method(value):
            return value

        def call(
            *args: object,
            **kwargs: object,
        ) -> Any:
            num_threads = self._num_threads or torch.get_num_threads()
            precision = full_on_gpu() if self._device.type == "cuda" else contextlib.nullcontext()
            with threads(num_threads), torch.no_grad(), current(self._device), precision:
                return value(*args, **kwargs)

        return call

    def __setitem__(
        self,
        name: str,
        value: object,
    ) -> None:
        """Set an attribute.

        Raises:
            NotPreservedError: it was not preserved.
            ContractError: it is a method, a constant, or of another type.
        """
        before = self._value(name)
        if _is_method(before):
            raise ContractError(f"{name!r} is a method of the frozen model, and cannot be set")
        owner, last = self._owner(name)
        try:
            setattr(owner, last, value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ContractError(
                f"{name!r}: got {type(value).__name__}, expected its current type"
                f" {type(before).__name__}, and no constant (Final): {last_line(error)}"
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def missing(self, name: str) -> NotPreservedError:
        """Error for a name that was not preserved; lists those that were."""
        return NotPreservedError(
            f"the frozen model has no attribute or method {name!r}; preserved are"
            f" {', '.join(self._names) or 'none'}. Freeze the model again with `preserve: [{name}]`"
        )

    def _value(self, name: str) -> Any:
        if name not in self._names:
            raise self.missing(name)
        owner, last = self._owner(name)
        return getattr(owner, last)

    def _owner(self, name: str) -> tuple[object, str]:
        """The module that has the named attribute, and the attribute's name there."""
        *parts, last = name.split(".")
        owner: object = self._module
        for part in parts:
            owner = getattr(owner, part, None)
        return owner, last


class PreservedPart:
    """A submodule of a frozen model with its preserved attributes: `model.sub.version`."""

    __slots__ = ("_path", "_preserved")

    def __init__(
        self,
        preserved: Preserved,
        path: str,
    ) -> None:
        object.__setattr__(self, "_preserved", preserved)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        return read(self._preserved, f"{self._path}.{name}")

    def __setattr__(
        self,
        name: str,
        value: object,
    ) -> None:
        self._preserved[f"{self._path}.{name}"] = value


def read(
    preserved: Preserved,
    path: str,
) -> Any:
    """The attribute, method or submodule at a path.

    Raises:
        NotPreservedError: it was not preserved.
    """
    if path in preserved:
        return preserved[path]
    if any(name.startswith(f"{path}.") for name in preserved):
        return PreservedPart(preserved, path)
    raise preserved.missing(path)


def _is_method(value: object) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module)


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function that raises for a method of REFUSED_NAMES."""

    def refuse(
        *args: object,
        **kwargs: object,
    ) -> NoReturn:
        raise ContractError(f"a frozen model has no .{name}(): {_REMEDY}", code="CP-FROZEN")

    return refuse
