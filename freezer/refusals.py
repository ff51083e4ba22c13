"""What every nn.Module can do and a frozen model refuses, each with its reason and remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from freezer.errors import ContractError

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


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function that refuses a method of REFUSED, whatever it is given."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ContractError(f"a frozen model has no .{name}(): {REFUSED[name]}", code="CP-FROZEN")

    return refuse


def copied() -> ContractError:
    """The error of copying or pickling a frozen model."""
    return ContractError(
        "a frozen model cannot be copied or pickled: its payload is open in this process; call freezer.load where it is needed",
        code="CP-FROZEN",
    )
