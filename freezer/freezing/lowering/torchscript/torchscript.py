"""TorchScript: store a scripted or traced module, frozen or as captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freezer.errors import BuildError
from freezer.freezing.capture.program import Captured
from freezer.freezing.diagnostics.messages import code_of, script_sentence
from freezer.freezing.lowering.result import Lowered, timed
from freezer.freezing.lowering.torchscript.torchscript_report import lowered
from freezer.freezing.target.target import Target
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

SUFFIX = ".pt"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Write a TorchScript file; with `freeze`, weights become constants, and with `optimize_numerics`, batch norms are folded.

    Attributes that forward or a preserved method changes stay attributes. The frozen module shares their tensors with the captured
    one; neither is run here.

    Raises:
        BuildError: torch.jit.freeze or save fails, the saved file could not be loaded, a batch norm runs in training mode (code
            CP-STATE), or the graph lacks a name to preserve (code CP-PRESERVE).
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        before = captured.program
        if getattr(before, "training", True):  # a module that was frozen before has no mode
            before = before.eval()
        _check_saves(before)
        if settings["freeze"]:
            _check_norms(before)
        _check_kept(before, captured.preserve, captured.name)
        phases_s: dict[str, float] = {}
        try:
            after = before
            if settings["freeze"]:
                with timed(phases_s, "freeze"):
                    after = torch.jit.freeze(
                        before, preserved_attrs=list(captured.preserve), optimize_numerics=settings["optimize_numerics"]
                    )
            _check_kept(after, captured.preserve, "torch.jit.freeze")
            with timed(phases_s, "save"):
                torch.jit.save(after, str(path))
        except RuntimeError as error:
            raise BuildError(f"torchscript: {script_sentence(error)}", code=code_of(error)) from error
        return lowered(captured, after, settings, phases_s)


def _check_saves(module: torch.jit.ScriptModule) -> None:
    graph: Any = module.inlined_graph  # owns its nodes
    if graph.findAllNodes("prim::ConstantMKLDNNTensor"):
        raise BuildError(
            "torchscript: torch.jit.optimize_for_inference was applied to the module, so its saved file would not load; give the "
            "module from before (the recipe torchscript-optimized applies it at load)"
        )


def _check_norms(module: torch.jit.ScriptModule) -> None:
    """Reject a batch norm in training mode within a model in eval mode.

    Its schema does not declare its writes, so torch.jit.freeze would make its statistics constants, and merge them with equal
    weights.
    """
    graph: Any = module.inlined_graph  # owns its nodes
    norms = [list(node.inputs()) for node in graph.findAllNodes("aten::batch_norm")]
    traced = any(inputs[5].toIValue() is True and inputs[3].type().kind() != "NoneType" for inputs in norms)
    modules = [part for part in module.modules() if getattr(part, "training", False) and hasattr(part, "running_mean")]
    if traced or any(part.running_mean is not None for part in modules):
        raise BuildError(
            "torchscript: a batch norm runs in training mode, and torch.jit.freeze would bake in its statistics; put it "
            "into eval mode, or give it track_running_stats=False",
            code="CP-STATE",
        )


def _check_kept(module: torch.jit.ScriptModule, preserve: Sequence[str], by: str) -> None:
    lost = [name for name in preserve if not _has(module, name)]
    if lost:
        raise BuildError(
            f"torchscript: the graph of {by} lacks {', '.join(lost)}, so it cannot be preserved; TorchScript keeps attributes that "
            "__init__ sets to numbers, strings, tensors, or annotated lists and dicts of them, and the model's own methods that it "
            "can compile",
            code="CP-PRESERVE",
        )


def _has(module: torch.jit.ScriptModule, name: str) -> bool:
    *parts, last = name.split(".")
    script: Any = module._c  # Python shows submodules of a frozen module only after it was saved and loaded
    for part in parts:
        if not script.hasattr(part):
            return False
        script = script.getattr(part)
    return bool(script.hasattr(last)) or (not parts and bool(script._has_method(last)))
