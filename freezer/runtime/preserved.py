"""What a frozen model kept of its source's attributes and methods: reading, setting and calling them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from freezer.errors import ContractError, NotPreservedError
from freezer.runtime.cuda import current
from freezer.runtime.devices import CPU
from freezer.runtime.precision import full_on_gpu
from freezer.runtime.threads import threads

_DEVICE = (
    "its weights are constants of the payload, and device logic is baked in; load the artifact of the other device class "
    "(`freezer.load(..., device_class=...)`), or freeze the source model for it"
)

_DTYPE = "its weights are constants of the payload, and so is their dtype; convert the source model and freeze it anew"

_TRAINING = "it is in eval mode for good: dropout is gone, batch norms are folded; train the source model and freeze it anew"

_WEIGHTS = (
    "its weights are constants of the payload; ask the source model for them. What must stay is named when the model is frozen: "
    "`preserve: [name]`"
)

_CODE = "its graph is compiled, and no Python runs between its operations; change the source model and freeze it anew"

_REASONS: Mapping[str, tuple[str, ...]] = {
    _DEVICE: ("to", "to_empty", "cuda", "cpu", "xpu", "ipu", "mtia", "share_memory"),
    _DTYPE: ("type", "float", "double", "half", "bfloat16"),
    _TRAINING: ("train", "requires_grad_", "zero_grad"),
    _WEIGHTS: (
        "parameters",
        "named_parameters",
        "get_parameter",
        "register_parameter",
        "buffers",
        "named_buffers",
        "get_buffer",
        "register_buffer",
        "state_dict",
        "load_state_dict",
        "get_extra_state",
        "set_extra_state",
        "modules",
        "named_modules",
        "children",
        "named_children",
        "get_submodule",
        "set_submodule",
        "add_module",
        "register_module",
    ),
    _CODE: (
        "apply",
        "compile",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_backward_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ),
}

REFUSED: Mapping[str, str] = {
    **{name: reason for reason, names in _REASONS.items() for name in names},
    "forward": "it is called itself: model(...)",
}
"""Methods of nn.Module, and why a frozen model has none of them."""


class Preserved:
    """The preserved attributes and methods of one payload, by name: `preserved["sub.version"]`, `preserved["reset"]()`.

    An attribute that is a tensor is the payload's own: writing into it changes the state. Any other value is a copy, as TorchScript
    gives it: a list is changed by setting it whole. A method takes and gives what the source's does, without gradients.

    Args:
        names: attributes, methods and attributes of submodules (`sub.version`).
        module: of the payload.
        num_threads: that methods run with; None for the process's own.
        device: that the payload lies on; on a GPU methods compute in full precision, as calls do.

    Raises:
        NotPreservedError: the payload lacks one of the names.
    """

    def __init__(self, names: Sequence[str], module: Any, num_threads: int | None, device: torch.device = CPU) -> None:
        self._names = tuple(names)
        self._module = module
        self._num_threads = num_threads
        self._device = device
        for name in self._names:
            owner, last = self._owner(name)
            if not hasattr(owner, last):
                raise NotPreservedError(f"{name!r} should be preserved, but the payload lacks it; freeze the model anew")

    def __getitem__(self, name: str) -> Any:
        """The value of an attribute, or a method to call."""
        value = self._value(name)
        return self._callable(value) if _is_method(value) else value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            NotPreservedError: freezing did not keep it.
            ContractError: it is a method, a constant, or of another type.
        """
        if name not in self._names:
            raise self.missing(name, to_set=True)
        old = self._value(name)
        if _is_method(old):
            raise ContractError(f"{name!r} is a method of the frozen model, which cannot be set; call it")
        owner, last = self._owner(name)
        try:
            setattr(owner, last, value)
        except (RuntimeError, TypeError, ValueError) as error:
            if "Can't set constant" in str(error):
                raise ContractError(f"{name!r} is a constant (Final) of the source, which can be read alone") from error
            raise ContractError(f"{name!r}: got {type(value).__name__}, expected what it is now: {type(old).__name__}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Preserved({', '.join(self._names)})"

    def has_part(self, path: str) -> bool:
        """Whether attributes of the submodule at this path are preserved."""
        return any(name.startswith(f"{path}.") for name in self._names)

    def missing(self, name: str, *, to_set: bool = False) -> NotPreservedError:
        """The error that says that a name was not preserved, and what was; of what was, with `to_set`, what can be set."""
        names = [kept for kept in self._names if not (to_set and _is_method(self._value(kept)))]
        kept = f"{'what can be set is' if to_set else 'it kept'} {', '.join(names)}" if names else "it kept none of its source's"
        return NotPreservedError(
            f"the frozen model has no attribute {'' if to_set else 'or method '}{name!r}; {kept}. Freeze the model anew with "
            f"`preserve: [{name}]`"
        )

    def _value(self, name: str) -> Any:
        if name not in self._names:
            raise self.missing(name)
        owner, last = self._owner(name)
        return getattr(owner, last)

    def _owner(self, name: str) -> tuple[Any, str]:
        """The module that holds what is named, and its name there."""
        *parts, last = name.split(".")
        owner = self._module
        for part in parts:
            owner = getattr(owner, part, None)
        return owner, last

    def _callable(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            exact = full_on_gpu() if self._device.type == "cuda" else contextlib.nullcontext()
            with threads(self._num_threads or torch.get_num_threads()), torch.no_grad(), current(self._device), exact:
                return method(*args, **kwargs)

        return call


class PreservedPart:
    """A submodule of a frozen model, as far as its attributes were preserved: `model.sub.version`."""

    __slots__ = ("_path", "_preserved")

    def __init__(self, preserved: Preserved, path: str) -> None:
        object.__setattr__(self, "_preserved", preserved)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        return read(self._preserved, f"{self._path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._preserved[f"{self._path}.{name}"] = value

    def __repr__(self) -> str:
        return f"PreservedPart({self._path})"


def read(preserved: Preserved, path: str) -> Any:
    """What is at a path: an attribute, a method, or the submodule whose attributes were preserved.

    Raises:
        NotPreservedError: freezing did not keep it.
    """
    if path in preserved:
        return preserved[path]
    if preserved.has_part(path):
        return PreservedPart(preserved, path)
    raise preserved.missing(path)


def _is_method(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module)


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function that refuses a method of REFUSED, whatever it is given."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ContractError(f"a frozen model has no .{name}(): {REFUSED[name]}", code="CP-FROZEN")

    return refuse
