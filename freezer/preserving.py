"""The names that a frozen model must keep: which captures can keep them, and that they did."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from freezer.errors import CaptureError

CODE = "CP-PRESERVE"


def refuse_kept(names: Sequence[str], what: str) -> None:
    """Refuse a capture that makes one function of a model.

    Raises:
        CaptureError: something is to be kept; code CP-PRESERVE.
    """
    if names:
        listed = ", ".join(repr(name) for name in names)
        raise CaptureError(
            f"{what} keeps no attribute or method, and {listed} must stay; preserve needs torch.jit.script or a TorchScript source",
            code=CODE,
        )


def check_scripted(program: torch.jit.ScriptModule, names: Sequence[str]) -> None:
    """Hold the names against a scripted model.

    Raises:
        CaptureError: it lacks one; code CP-PRESERVE.
    """
    for name in names:
        owner, last = _owner(program, name)
        if owner is None or not _has_scripted(owner, last):
            raise CaptureError(
                f"preserve: TorchScript keeps no {name!r}: its value is of no type that TorchScript has, or it is ignored; make it "
                "a tensor, number, text, or list, tuple or dict of one type",
                code=CODE,
            )


@contextlib.contextmanager
def compiled_too(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let torch.jit.script compile those of the names that are methods, as if @torch.jit.export stood above them."""
    functions = [function for name in names if (function := _method(model, name)) is not None]
    marked = [function for function in functions if not hasattr(function, "_torchscript_modifier")]
    for function in marked:
        torch.jit.export(function)
    try:
        yield
    finally:
        for function in marked:
            if hasattr(function, "_torchscript_modifier"):
                del function._torchscript_modifier


def _owner(model: Any, name: str) -> tuple[Any, str]:
    """The submodule that a dotted name is of, None where there is none; and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        model = getattr(model, part, None)
    return model, last


def _has_scripted(owner: Any, last: str) -> bool:
    return isinstance(owner, torch.jit.ScriptModule) and (owner._c.hasattr(last) or last in owner._c._method_names())


def _method(model: nn.Module, name: str) -> Any:
    """The function of a method of a Python module; None where the name is no such method."""
    owner, last = _owner(model, name)
    if owner is None or isinstance(owner, torch.jit.ScriptModule):
        return None
    value = getattr(owner, last, None)
    return value.__func__ if inspect.ismethod(value) else None
