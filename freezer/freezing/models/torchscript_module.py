"""Wrappers that call ScriptModules differently."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.jit import ScriptModule

from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.spec import ConstantSpec, InputItem, InputSpec, TensorSpec


def with_forward(module: ScriptModule, method: str) -> ScriptModule:
    """A ScriptModule whose `forward` is another method of the given one, with the same argument
    names, types and defaults.

    It shares weights and state, under `model.`. Other methods keep their names if TorchScript can
    write their arguments' types.

    Raises:
        ValueError: there is no such method.
    """
    methods: list[str] = sorted(module._c._method_names())
    if method not in methods:
        names = ", ".join(methods)
        raise ValueError(f"got method {method!r}, expected one of {names}")
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        _define(wrapper, module, method, "forward")
        for other in methods:
            if other in (method, "forward", "model"):
                continue
            with contextlib.suppress(RuntimeError):
                _define(wrapper, module, other, other)
    return wrapper.train(module.training)


def _define(wrapper: ScriptModule, module: ScriptModule, method: str, name: str) -> None:
    """Define a method of the wrapper that calls one of the module's."""
    schema = module._c._get_method(method).schema
    _, *arguments = schema.arguments
    parameters = ["self"]
    for argument in arguments:
        annotation = argument.type.annotation_str
        parameter = f"{argument.name}: {annotation}"
        if argument.has_default_value():
            parameter += f"={_literal(argument.default_value)}"
        parameters.append(parameter)
    names = [argument.name for argument in arguments]
    call = f"self.model.{method}({', '.join(names)})"
    head = f"def {name}({', '.join(parameters)}):"
    wrapper.define(f"{head}\n    return {call}\n")


def flat_forward(module: ScriptModule, spec: InputSpec) -> ScriptModule:
    """A ScriptModule that takes the tensor inputs in order and calls the given one, with constants
    written into the call.

    Raises:
        RuntimeError: TorchScript does not accept such a call.
    """
    names: dict[str, str] = {}
    parameters = ["self"]
    for index, tensor in enumerate(spec.tensors):
        names[tensor.name] = f"tensors_{index}"
        parameters.append(f"tensors_{index}: Tensor")
    arguments = []
    for item in spec.inputs:
        argument = _call_text(item, names)
        if spec.style == "keyword":
            argument = f"{item.name}={argument}"
        arguments.append(argument)
    call = f"self.model.forward({', '.join(arguments)})"
    with torchscript_deprecations_silenced():
        wrapper = torch.jit.script(_holder(module))
        head = f"def forward({', '.join(parameters)}):"
        wrapper.define(f"{head}\n    return {call}\n")
    return wrapper.train(module.training)


def _call_text(item: InputItem, names: Mapping[str, str]) -> str:
    """TorchScript's source text of an input."""
    if isinstance(item, TensorSpec):
        return names[item.name]
    if isinstance(item, ConstantSpec):
        return _literal(item.value)
    parts = [_call_text(part, names) for part in item.items]
    if item.kind == "list":
        return f"[{', '.join(parts)}]"
    if item.kind == "tuple":
        return _tuple(parts)
    entries = []
    for key, part in zip(item.keys, parts, strict=True):
        literal = _literal(key)
        entries.append(f"{literal}: {part}")
    return f"{{{', '.join(entries)}}}"


def _tuple(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return f"({parts[0]},)"
    return f"({', '.join(parts)})"


def _holder(module: ScriptModule) -> nn.Module:
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
        parts = [_literal(each) for each in value]
        return _tuple(parts)
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return repr(value)
