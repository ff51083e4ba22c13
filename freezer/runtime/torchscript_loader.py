"""Open TorchScript payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from freezer.errors import IncompatibleError
from freezer.runtime.devices import CPU
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced


def open_torchscript(
    path: Path, settings: Mapping[str, Any], device: torch.device = CPU, *, one_at_a_time: bool = False
) -> Callable[..., Any]:
    """A runner of the file, on a device; with `optimize_for_inference`, which torch.jit cannot save, it is optimized here.

    It is in eval mode as it lies. `eval()` must not be called: it would give the frozen module an attribute `training`, by which
    torch.jit.optimize_for_inference takes it for one to freeze, and drops what was preserved.

    Raises:
        IncompatibleError: its graph names another GPU, which reading it for this one does not change.
        RuntimeError: the file is no TorchScript, or torch.jit.optimize_for_inference fails on this machine.
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        module = torch.jit.load(str(path), map_location=device)
        _check_device(module, path, device)
        if settings.get("optimize_for_inference"):
            others = [name for name in module._c._method_names() if name != "forward"]
            module = torch.jit.optimize_for_inference(module, other_methods=sorted(others))
    runner: Callable[..., Any] = module
    return runner


def _check_device(module: torch.jit.ScriptModule, path: Path, device: torch.device) -> None:
    """Hold a file to the device that it is opened for: `map_location` moves its tensors, not the devices that its graph names."""
    if device.type != "cuda":
        return
    others = [name for name in sorted(device_uses(module, "cuda")) if name not in ("cuda", str(device))]
    if others:
        raise IncompatibleError(
            f"{path.name}: its graph makes tensors on {', '.join(others)}, and {device} was asked for; load it for {others[0]}, "
            f"set CUDA_VISIBLE_DEVICES so that the GPU is {others[0]}, or take devices from inputs (x.device) and freeze it anew"
        )


def device_uses(module: torch.jit.ScriptModule, kind: str) -> dict[str, list[str]]:
    """By device of a kind that `forward` names as a constant, the source ranges of what uses it."""
    if "forward" not in module._c._method_names():
        return {}
    graph: Any = module.inlined_graph  # held: its nodes die with it
    found: dict[str, list[str]] = {}
    for node in graph.findAllNodes(f"aten::{kind}"):
        _add_uses(found, kind, kind, [node])
    for name in ("prim::Constant", "prim::GetAttr"):
        for node in graph.findAllNodes(name):
            users = [use.user for use in node.output().uses()]
            if str(node.output().type()) == "str":  # compared with a device's type it is no device
                users = [user for user in users if user.kind() == "aten::device"]
            elif str(node.output().type()) != "Device":
                continue
            if users:
                device = node.output().toIValue() if name == "prim::Constant" else _attribute(module, node)
                _add_uses(found, kind, str(device), users)
    return found


def _add_uses(found: dict[str, list[str]], kind: str, device: str, users: list[Any]) -> None:
    if device.partition(":")[0] == kind:
        found.setdefault(device, []).extend(user.sourceRange() for user in users)


def _attribute(module: torch.jit.ScriptModule, node: Any) -> Any:
    """The value that a GetAttr node of the module's inlined graph reads."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.input().node()
    value: Any = module
    for name in names:
        value = getattr(value, name, None)
    return value
