"""What the graph of a ScriptModule tells: the devices that it names; and ScriptModules that call another in another way."""

from __future__ import annotations

import contextlib
import math
import re

import torch
from torch import nn

from freezer.freezing.diagnostics.source_lines import marked_in
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.torchscript_loader import device_uses
from freezer.spec.inputs import InputSpec
from freezer.spec.items import ConstantSpec, InputItem, TensorSpec


def cuda_constants(module: torch.jit.ScriptModule) -> list[str]:
    """The CUDA devices that `forward` names as constants; see `named_devices`."""
    return named_devices(module, "cuda")


def named_devices(module: torch.jit.ScriptModule, kind: str) -> list[str]:
    """The devices of a kind that `forward` names as constants, each with the source line of its first use:
    `cuda:0 (model.py:12: …)`.

    They are what moving a module to another device does not change. Calls of submodules are looked into; other methods are not.
    A device that is named only where the inputs are on a GPU already is told too.

    Args:
        module: a TorchScript module.
        kind: `cuda`, or `cpu`.
    """
    lines = {device: next(filter(None, map(marked_in, ranges)), "") for device, ranges in device_uses(module, kind).items()}
    return [f"{device} ({line})" if line else device for device, line in sorted(lines.items())]


def with_forward(module: torch.jit.ScriptModule, method: str) -> torch.jit.ScriptModule:
    """A ScriptModule whose `forward` is a method of the given one, with the same argument names, types and defaults.

    Weights and state are the given module's own, under `model.`; its other methods but `forward` keep their names, where
    TorchScript can write their arguments' types.

    Raises:
        ValueError: there is no such method; the message names those that exist.
    """
    methods: list[str] = sorted(module._c._method_names())
    if method not in methods:
        raise ValueError(f"got method {method!r}, expected one of {', '.join(methods) or 'none: the file has no method'}")
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        _define(wrapper, module, method, "forward")
        for other in methods:
            if other not in (method, "forward", "model"):
                with contextlib.suppress(RuntimeError):
                    _define(wrapper, module, other, other)
    return wrapper.train(module.training)


def _define(wrapper: torch.jit.ScriptModule, module: torch.jit.ScriptModule, method: str, name: str) -> None:
    """Give a holder of a module a method that calls one of the module's."""
    arguments = module._c._get_method(method).schema.arguments[1:]  # without self
    parameters = [
        f"{argument.name}: {argument.type.annotation_str}"
        + (f"={_literal(argument.default_value)}" if argument.has_default_value() else "")
        for argument in arguments
    ]
    call = f"self.model.{method}({', '.join(argument.name for argument in arguments)})"
    wrapper.define(f"def {name}({', '.join(['self', *parameters])}):\n    return {call}\n")


def flat_forward(module: torch.jit.ScriptModule, spec: InputSpec) -> torch.jit.ScriptModule:
    """A ScriptModule that calls the given one with its tensor inputs in order; constants are written into it.

    Raises:
        RuntimeError: TorchScript does not take such a call.
    """
    arguments = [_call_text(item) for item in spec.inputs]
    if spec.style == "keyword":
        arguments = [f"{item.name}={text}" for item, text in zip(spec.inputs, arguments, strict=True)]
    names = [variable_of(item.name) for item in spec.tensors]
    parameters = ", ".join(["self", *(f"{name}: Tensor" for name in names)])
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        wrapper.define(f"def forward({parameters}):\n    return self.model.forward({', '.join(arguments)})\n")
    return wrapper.train(module.training)


def _call_text(item: InputItem) -> str:
    """TorchScript's source text of an input."""
    if isinstance(item, TensorSpec):
        return variable_of(item.name)
    if isinstance(item, ConstantSpec):
        return _literal(item.value)
    parts = [_call_text(part) for part in item.items]
    if item.kind == "dict":
        return "{" + ", ".join(f"{_literal(key)}: {part}" for key, part in zip(item.keys, parts, strict=True)) + "}"
    if item.kind == "list":
        return f"[{', '.join(parts)}]"
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def variable_of(path: str) -> str:
    """The parameter of `flat_forward` for a tensor, by its path; no two paths give one."""
    return "t_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", path)


def _holder(module: torch.jit.ScriptModule) -> nn.Module:
    class Holder(nn.Module):
        """Holds the module. Made anew each time: TorchScript gives `forward` to the type, and shares one type by class."""

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
