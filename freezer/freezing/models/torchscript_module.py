"""ScriptModules: the devices that their graphs name, and wrappers that call them differently."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from freezer.freezing.diagnostics import marked_in
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import ConstantSpec, InputItem, InputSpec, TensorSpec


def named_devices(module: torch.jit.ScriptModule, kind: str) -> list[str]:
    """The constant devices of a kind in `forward` and the submodules that it calls, which moving
    the module does not change.

    Each has the source line of its first use: `cuda:0 (model.py:12: …)`. Devices on paths that only
    run on a GPU are included.

    Args:
        module: a TorchScript module.
        kind: `cuda`, or `cpu`.
    """
    lines = {
        device: next(filter(None, map(marked_in, ranges)), "")
        for device, ranges in device_uses(module, kind).items()
    }
    return [f"{device} ({line})" if line else device for device, line in sorted(lines.items())]


def device_uses(module: torch.jit.ScriptModule, kind: str) -> dict[str, list[str]]:
    """Source ranges of the uses of each device of a kind that `forward` names as a constant."""
    if "forward" not in module._c._method_names():
        return {}
    graph: Any = module.inlined_graph  # owns its nodes
    found: dict[str, list[str]] = {}
    for node in graph.findAllNodes(f"aten::{kind}"):
        _add_uses(found, kind, kind, [node])
    for name in ("prim::Constant", "prim::GetAttr"):
        for node in graph.findAllNodes(name):
            users = [use.user for use in node.output().uses()]
            if (
                str(node.output().type()) == "str"
            ):  # a device only in torch.device(), not in a comparison
                users = [user for user in users if user.kind() == "aten::device"]
            elif str(node.output().type()) != "Device":
                continue
            if users:
                device = (
                    node.output().toIValue()
                    if name == "prim::Constant"
                    else _attribute(module, node)
                )
                _add_uses(found, kind, str(device), users)
    return found


def _add_uses(found: dict[str, list[str]], kind: str, device: str, users: list[Any]) -> None:
    if device.partition(":")[0] == kind:
        found.setdefault(device, []).extend(user.sourceRange() for user in users)


def _attribute(module: torch.jit.ScriptModule, node: Any) -> Any:
    """Value that a GetAttr node of the module's inlined graph reads."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.input().node()
    value: Any = module
    for name in names:
        value = getattr(value, name, None)
    return value


def with_forward(module: torch.jit.ScriptModule, method: str) -> torch.jit.ScriptModule:
    """A ScriptModule whose `forward` is another method of the given one, with the same argument
    names, types and defaults.

    It shares weights and state, under `model.`. Other methods keep their names if TorchScript can
    write their arguments' types.

    Raises:
        ValueError: there is no such method.
    """
    methods: list[str] = sorted(module._c._method_names())
    if method not in methods:
        raise ValueError(
            f"got method {method!r}, expected one of"
            f" {', '.join(methods) or 'none: the file has no method'}"
        )
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        _define(wrapper, module, method, "forward")
        for other in methods:
            if other not in (method, "forward", "model"):
                with contextlib.suppress(RuntimeError):
                    _define(wrapper, module, other, other)
    return wrapper.train(module.training)


def _define(
    wrapper: torch.jit.ScriptModule, module: torch.jit.ScriptModule, method: str, name: str
) -> None:
    """Define a method of the wrapper that calls one of the module's."""
    arguments = module._c._get_method(method).schema.arguments[1:]  # without self
    parameters = [
        f"{argument.name}: {argument.type.annotation_str}"
        + (f"={_literal(argument.default_value)}" if argument.has_default_value() else "")
        for argument in arguments
    ]
    call = f"self.model.{method}({', '.join(argument.name for argument in arguments)})"
    wrapper.define(f"def {name}({', '.join(['self', *parameters])}):\n    return {call}\n")


def flat_forward(module: torch.jit.ScriptModule, spec: InputSpec) -> torch.jit.ScriptModule:
    """A ScriptModule that takes the tensor inputs in order and calls the given one, with constants
    written into the call.

    Raises:
        RuntimeError: TorchScript does not accept such a call.
    """
    names = {item.name: f"tensors_{index}" for index, item in enumerate(spec.tensors)}
    arguments = [_call_text(item, names) for item in spec.inputs]
    if spec.style == "keyword":
        arguments = [
            f"{item.name}={text}" for item, text in zip(spec.inputs, arguments, strict=True)
        ]
    parameters = ", ".join(["self", *(f"{name}: Tensor" for name in names.values())])
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        wrapper.define(
            f"def forward({parameters}):\n    return self.model.forward({', '.join(arguments)})\n"
        )
    return wrapper.train(module.training)


def _call_text(item: InputItem, names: Mapping[str, str]) -> str:
    """TorchScript's source text of an input."""
    if isinstance(item, TensorSpec):
        return names[item.name]
    if isinstance(item, ConstantSpec):
        return _literal(item.value)
    parts = [_call_text(part, names) for part in item.items]
    if item.kind == "dict":
        return (
            "{"
            + ", ".join(
                f"{_literal(key)}: {part}" for key, part in zip(item.keys, parts, strict=True)
            )
            + "}"
        )
    if item.kind == "list":
        return f"[{', '.join(parts)}]"
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _holder(module: torch.jit.ScriptModule) -> nn.Module:
    class Holder(nn.Module):
        """Holds the module.

        A new class each time: TorchScript shares one type, and so one `forward`, per class.
        """

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    return Holder(module)


def _literal(value: object) -> str:
    """TorchScript's source text of a default value."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value)
