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
    """Open a file on a device; `optimize_for_inference`, which torch.jit cannot save, is applied here.

    The module is saved in eval mode. Do not call `eval()`: it would add an attribute `training`, so that
    torch.jit.optimize_for_inference freezes the module again and drops preserved names.

    Raises:
        IncompatibleError: the graph names another GPU.
        RuntimeError: the file is not TorchScript, or torch.jit.optimize_for_inference fails on this machine.
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
    """Refuse a graph that names another GPU; `map_location` moves tensors, not the devices in the graph."""
    if device.type != "cuda":
        return
    others = [name for name in sorted(device_uses(module, "cuda")) if name not in ("cuda", str(device))]
    if others:
        raise IncompatibleError(
            f"{path.name}: its graph makes tensors on {', '.join(others)}, got device {device}; load it for {others[0]}, "
            f"set CUDA_VISIBLE_DEVICES so that the GPU is {others[0]}, or take devices from inputs (x.device) and freeze it again"
        )


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
            if str(node.output().type()) == "str":  # a device only in torch.device(), not in a comparison
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
    """Value that a GetAttr node of the module's inlined graph reads."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.input().node()
    value: Any = module
    for name in names:
        value = getattr(value, name, None)
    return value
