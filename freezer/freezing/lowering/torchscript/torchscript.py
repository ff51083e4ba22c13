"""TorchScript: a scripted or traced module, frozen or as it came."""

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
    """Write a TorchScript file; with `freeze`, weights become constants and, with `optimize_numerics`, batch norms are folded.

    What forward changes, and what a preserved method changes, stays an attribute. The frozen module holds the tensors of such
    attributes in common with the captured one, and neither is run here.

    Raises:
        BuildError: torch.jit.freeze or save refuses, what is saved could not be loaded, a batch norm runs in training mode (code
            CP-STATE), or the graph lacks what should be preserved (code CP-PRESERVE).
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        before = captured.program
        if getattr(before, "training", True):  # freeze takes none in training mode, and none that came frozen, without a mode
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
                    after = _frozen(before, captured.preserve, settings)
            _check_kept(after, captured.preserve, "torch.jit.freeze")
            with timed(phases_s, "save"):
                torch.jit.save(after, str(path))
        except RuntimeError as error:
            raise BuildError(f"torchscript: {script_sentence(error)}", code=code_of(error)) from error
        return lowered(captured, after, settings, phases_s)


def _frozen(module: torch.jit.ScriptModule, preserve: Sequence[str], settings: Mapping[str, Any]) -> torch.jit.ScriptModule:
    """The frozen module; torch.jit.freeze optimizes the graphs of preserved methods as it does forward's.

    A module that came frozen, which has no attribute `training`, is frozen again.
    """
    frozen: torch.jit.ScriptModule = torch.jit.freeze(
        module, preserved_attrs=list(preserve), optimize_numerics=settings["optimize_numerics"]
    )
    return frozen


def _check_saves(module: torch.jit.ScriptModule) -> None:
    graph: Any = module.inlined_graph  # held: its nodes die with it
    if graph.findAllNodes("prim::ConstantMKLDNNTensor"):
        raise BuildError(
            "torchscript: torch.jit.optimize_for_inference was applied to the module, and what it makes is saved but never loads; "
            "give the module from before (the recipe torchscript-optimized applies it at load)"
        )


def _check_norms(module: torch.jit.ScriptModule) -> None:
    """Refuse a batch norm in training mode, within a model in eval mode.

    Its schema does not say that it writes: torch.jit.freeze takes what it writes into for constants, and constants of equal values
    for one, so that weights change with the statistics.
    """
    graph: Any = module.inlined_graph  # held: its nodes die with it
    norms = [list(node.inputs()) for node in graph.findAllNodes("aten::batch_norm")]
    traced = any(inputs[5].toIValue() is True and inputs[3].type().kind() != "NoneType" for inputs in norms)
    modules = [part for part in module.modules() if getattr(part, "training", False) and hasattr(part, "running_mean")]
    if traced or any(part.running_mean is not None for part in modules):
        raise BuildError(
            "torchscript: a batch norm runs in training mode, and torch.jit.freeze would bake in the statistics that it changes; "
            "put it into eval mode, or give it track_running_stats=False",
            code="CP-STATE",
        )


def _check_kept(module: torch.jit.ScriptModule, preserve: Sequence[str], by: str) -> None:
    lost = [name for name in preserve if not _has(module, name)]
    if lost:
        what = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not in the graph that {by} gave"
        raise BuildError(
            f"torchscript: {what}, and cannot be preserved; TorchScript keeps attributes that __init__ sets to numbers, texts, "
            "tensors, or lists and dicts of them whose type is annotated, and methods of the model itself that it can compile",
            code="CP-PRESERVE",
        )


def _has(module: torch.jit.ScriptModule, name: str) -> bool:
    *parts, last = name.split(".")
    script: Any = module._c  # what torch.jit.freeze gives shows its submodules only once it was saved and loaded
    for part in parts:
        if not script.hasattr(part):
            return False
        script = script.getattr(part)
    return bool(script.hasattr(last)) or (not parts and bool(script._has_method(last)))
