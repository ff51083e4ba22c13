"""Report what torch.jit.freeze did to a module, from the graphs before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freezer.artifact.sections import Change, FreezingReport, KeptTensor, PreservedName, stored_as_captured
from freezer.errors import first_line
from freezer.freezing.capture.program import Captured
from freezer.freezing.lowering.readable import torchscript_texts
from freezer.freezing.lowering.result import Lowered, timed
from freezer.freezing.lowering.torchscript.graph_analysis import (
    Mutation,
    Path,
    attribute_of,
    has_attribute,
    inlined,
    mutations,
    operators,
    tensor_constants,
    tensors_in,
)
from freezer.freezing.lowering.torchscript.pass_replay import (
    ReplayError,
    clean_up,
    optimizations,
    optimizations_at_load,
    used_attributes,
)
from freezer.runtime.tensors import identity_of, named_tensors, storage_of, tensors_bytes

_ASKED = "asked for"


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """A module before and after torch.jit.freeze.

    Attributes:
        before, after: ScriptModules; `before` is the captured one in eval mode.
        preserved, optimize_numerics: arguments of torch.jit.freeze.
        at_load: whether the loader optimizes for inference.
        prefix: prefix of names in the captured module, which the source model's names lack; `model.` of flat captures.
    """

    before: Any
    after: Any
    preserved: Sequence[str] = ()
    optimize_numerics: bool = True
    at_load: bool = False
    prefix: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """`forward` and the preserved methods."""
        own = self.before._c._method_names()
        return tuple(dict.fromkeys(("forward", *(name for name in self.preserved if name in own))))

    def named(self, path: Path) -> str:
        """An attribute's name in the source model."""
        return ".".join(path).removeprefix(self.prefix)


def lowered(captured: Captured, module: Any, settings: Mapping[str, Any], phases_s: dict[str, float]) -> Lowered:
    """The result of a TorchScript lowering, with its report.

    Args:
        captured: the captured module.
        module: the module of the payload.
        settings: the recipe's settings.
        phases_s: wall times of the lowering; the report's own is added.
    """
    with timed(phases_s, "report"):
        try:
            report, texts = _described(captured, module, settings)
        except Exception as error:  # the report uses private functions of torch; the payload does not depend on it
            report, texts = FreezingReport(notes=(f"No report could be made: {_message(error)}.",)), {}
    return Lowered(report=replace(report, phases_s=phases_s), texts=texts)


def _described(captured: Captured, module: Any, settings: Mapping[str, Any]) -> tuple[FreezingReport, dict[str, str]]:
    prefix = "model." if captured.convention == "flat" else ""
    if not settings["freeze"]:
        return report_unfrozen(module, captured.preserve, prefix=prefix), {}
    freezing = Freezing(
        before=captured.program,
        after=module,
        preserved=captured.preserve,
        optimize_numerics=settings["optimize_numerics"],
        at_load=settings.get("optimize_for_inference", False),
        prefix=prefix,
    )
    return report_freezing(freezing), torchscript_texts(module, freezing.methods)


def report_freezing(freezing: Freezing) -> FreezingReport:
    """Report what freezing did; the build adds sizes and times. Changes that the replay cannot count are noted."""
    before, after = freezing.before._c, freezing.after._c
    graphs = {method: inlined(before, method) for method in freezing.methods}
    frozen_graphs = [after._get_method(method).graph for method in freezing.methods]
    tensors = {tuple(name.split(".")): tensor for name, tensor in named_tensors(freezing.before)}
    changed = mutations(graphs)
    changes, at_load, notes, used = _changes(freezing)
    gone = [path for path in tensors if used is not None and not has_attribute(after, path)]
    # by identity, because a trace reads tied tensors by one name, and an LSTM reads its weights from a list
    read = {identity_of(tensor) for path in used or () for tensor in tensors_in(attribute_of(before, path))}
    constants = [path for path in gone if identity_of(tensors[path]) in read]
    found = [tensors[path] for path in constants]
    return FreezingReport(
        ops_before=_total(graphs.values()),
        ops_after=_total(frozen_graphs),
        changes=changes,
        changes_at_load=at_load,
        num_constants=len({identity_of(tensor) for tensor in found}),
        constants_bytes=tensors_bytes(found),
        constants=tuple(freezing.named(path) for path in constants),
        folded_bytes=_new_bytes(frozen_graphs, [*tensors.values(), *tensor_constants(list(graphs.values()))]),
        kept=tuple(
            KeptTensor(name=freezing.named(path), reason=_why_kept(freezing, path, changed))
            for path in tensors
            if has_attribute(after, path)
        ),
        unused=tuple(freezing.named(path) for path in gone if path not in constants),
        preserved=tuple(_preserved(freezing, changed)),
        notes=notes,
    )


def report_unfrozen(module: Any, preserved: Sequence[str] = (), *, prefix: str = "") -> FreezingReport:
    """Report a module that is stored as captured: its operators, changed tensors and preserved names.

    Args:
        module: the ScriptModule.
        preserved: requested attributes and methods.
        prefix: see `Freezing`.
    """
    tensors = dict(named_tensors(module))
    graph = inlined(module._c, "forward")
    ops = dict(operators(graph))
    changed = {".".join(path): str(mutation) for path, mutation in mutations({"forward": graph}).items()}
    return FreezingReport(
        ops_before=ops,
        ops_after=ops,
        kept=tuple(KeptTensor(name=name.removeprefix(prefix), reason=changed[name]) for name in tensors if name in changed),
        preserved=tuple(
            PreservedName(
                name=name.removeprefix(prefix), kind="method" if name in module._c._method_names() else "attribute", why=_ASKED
            )
            for name in preserved
        ),
        notes=(stored_as_captured(len(tensors)),),
    )


def _changes(freezing: Freezing) -> tuple[tuple[Change, ...], tuple[Change, ...], tuple[str, ...], set[Path] | None]:
    """Changes by freezing, changes at load, notes, and the tensors that calls read (None if unknown)."""
    before, after, methods = freezing.before._c, freezing.after._c, freezing.methods
    changes: Counter[str] = Counter()
    at_load: Counter[str] = Counter()
    notes: list[str] = []
    used: set[Path] | None = None
    try:
        frozen = torch._C._freeze_module(before, list(freezing.preserved))
        used = used_attributes(before, frozen, methods)
        steps: tuple[Callable[[], Counter[str]], ...] = (
            lambda: clean_up(before, frozen, methods),
            lambda: optimizations(frozen, after, methods, numerics=freezing.optimize_numerics),
        )
        for step in steps:
            try:
                changes.update(step())
            except ReplayError as error:
                notes.append(f"Some changes could not be counted: {error}.")
        if freezing.at_load:
            at_load = optimizations_at_load(after, methods)
    except Exception as error:  # the replay uses private functions of torch
        notes.append(f"The changes could not be counted: {_message(error)}.")
    return _listed(changes), _listed(at_load), tuple(notes), used


def _listed(counts: Counter[str]) -> tuple[Change, ...]:
    return tuple(Change(name=name, count=count) for name, count in counts.items() if count > 0)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _total(graphs: Iterable[Any]) -> dict[str, int]:
    return dict(sum((operators(graph) for graph in graphs), Counter()))


def _new_bytes(graphs: Collection[Any], known: Iterable[Tensor]) -> int:
    """Size of the graphs' constants that are not in the memory of the known tensors."""
    new = {storage_of(tensor) for tensor in tensor_constants(graphs)} - {storage_of(tensor) for tensor in known}
    return sum(storage[1] for storage in new if storage is not None)


def _why_kept(freezing: Freezing, path: Path, changed: Mapping[Path, Mutation]) -> str:
    if path in changed:
        return str(changed[path])
    name = ".".join(path)
    if any(name == asked or name.startswith(f"{asked}.") for asked in freezing.preserved):
        return _ASKED
    return "torch.jit.freeze keeps it an attribute"


def _preserved(freezing: Freezing, changed: Mapping[Path, Mutation]) -> Iterable[PreservedName]:
    own = freezing.before._c._method_names()
    for name in freezing.preserved:
        path = tuple(name.split("."))
        why = _ASKED + (f"; {changed[path]}" if path in changed else "")
        yield PreservedName(name=freezing.named(path), kind="method" if name in own else "attribute", why=why)
    asked = {tuple(name.split(".")) for name in freezing.preserved}
    for path, mutation in changed.items():
        if path not in asked and has_attribute(freezing.after._c, path):
            yield PreservedName(name=freezing.named(path), kind="attribute", why=str(mutation))
