"""TorchScript: store a scripted or traced module, frozen or as captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.jit import ScriptModule

from freezer.artifact import FreezingReport, KeptTensor, PreservedName, stored_as_captured
from freezer.errors import BuildError
from freezer.freezing.capture import Captured, Texts
from freezer.freezing.diagnostics import sentence
from freezer.freezing.lowering.lowered import (
    Lowered,
    Phases,
    script_operators,
    timed,
    torchscript_texts,
)
from freezer.freezing.recipes import Settings
from freezer.freezing.target import Target
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import identity_of, named_tensors, tensors_bytes

SUFFIX = ".pt"


@torchscript_deprecations_silenced()
@torch.no_grad()
def build(captured: Captured, path: Path, target: Target, settings: Settings) -> Lowered:
    """Write a TorchScript file; with `freeze`, weights become constants, and with
    `optimize_numerics`, batch norms are folded.

    Attributes that forward or a preserved method changes stay attributes. The frozen module shares
    their tensors with the captured one; neither is run here.

    Raises:
        BuildError: torch.jit.freeze or save fails, or the graph lacks a name to preserve (code
            CP-PRESERVE).
    """
    before = captured.program
    if getattr(before, "training", True):  # a module that was frozen before has no mode
        before = before.eval()
    _check_kept(before, captured.preserve, captured.name)
    try:
        return _build(captured, before, path, settings)
    except RuntimeError as error:
        raise BuildError(f"torchscript: {sentence(error, 'script')}") from error


def _build(
    captured: Captured,
    before: ScriptModule,
    path: Path,
    settings: Settings,
) -> Lowered:
    phases_s = Phases()
    after, report = before, _report(captured)
    texts: Texts = {}
    if settings["freeze"]:
        with timed(phases_s, "freeze"):
            after = torch.jit.freeze(
                before,
                preserved_attrs=list(captured.preserve),
                optimize_numerics=settings["optimize_numerics"],
            )
        _check_kept(after, captured.preserve, "torch.jit.freeze")
        report = _report_frozen(report, captured, after)
        texts = torchscript_texts(after, _methods(captured))
    with timed(phases_s, "save"):
        torch.jit.save(after, str(path))
    return Lowered(report=replace(report, phases_s=phases_s), texts=texts)


def _check_kept(module: ScriptModule, preserve: Sequence[str], by: str) -> None:
    lost = [name for name in preserve if not _has(module, name)]
    if lost:
        raise BuildError(
            f"torchscript: the graph of {by} lacks {', '.join(lost)}, so it cannot be preserved;"
            " TorchScript keeps attributes that __init__ sets to numbers, strings, tensors, or"
            " annotated lists and dicts of them, and the model's own methods that it can compile",
            code="CP-PRESERVE",
        )


def _has(module: ScriptModule, name: str) -> bool:
    *parts, last = name.split(".")
    script: Any = (
        module._c
    )  # Python shows submodules of a frozen module only after it was saved and loaded
    for part in parts:
        if not script.hasattr(part):
            return False
        script = script.getattr(part)
    return bool(script.hasattr(last)) or (not parts and bool(script._has_method(last)))


def _methods(captured: Captured) -> list[str]:
    """`forward` and the preserved methods."""
    return [
        "forward",
        *(name for name in captured.preserve if captured.program._c._has_method(name)),
    ]


def _operators(module: Any, methods: Sequence[str]) -> Counter[str]:
    graphs = [module._c._get_method(method).inlined_graph for method in methods]
    return sum(map(script_operators, graphs), Counter())


def _report(captured: Captured) -> FreezingReport:
    """Report a module that is stored as captured."""
    methods = _methods(captured)
    preserved = tuple(
        PreservedName(
            name=captured.source_name(name),
            kind="method" if name in methods else "attribute",
            why="requested",
        )
        for name in captured.preserve
    )
    ops = _operators(captured.program, methods)
    return FreezingReport(
        ops_before=ops,
        ops_after=ops,
        preserved=preserved,
        notes=(stored_as_captured(len(dict(named_tensors(captured.program)))),),
    )


def _report_frozen(report: FreezingReport, captured: Captured, after: Any) -> FreezingReport:
    """Report what freezing changed, by comparing the graphs of the captured module with those of
    the payload's.
    """
    tensors = dict(named_tensors(captured.program))
    constants = {}
    kept = []
    for name, tensor in tensors.items():
        if _has(after, name):
            is_requested = any(f"{name}.".startswith(f"{each}.") for each in captured.preserve)
            reason = "requested" if is_requested else "a call changes it"
            kept.append(KeptTensor(name=captured.source_name(name), reason=reason))
        else:
            constants[name] = tensor
    return replace(
        report,
        ops_after=_operators(after, _methods(captured)),
        notes=(),
        num_constants=len(set(map(identity_of, constants.values()))),
        constants_bytes=tensors_bytes(constants.values()),
        constants=tuple(map(captured.source_name, constants)),
        kept=tuple(kept),
    )
