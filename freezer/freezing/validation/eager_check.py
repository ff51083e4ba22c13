"""Run the eager model on the input sets of a freeze, with every check that needs no graph; for `coldpress freeze --debug`.

Nothing is captured or written. The command disables TorchScript (PYTORCH_JIT=0), so that debuggers work in scripted functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.freezing.models.subject import Subject
from freezer.freezing.validation.reference import Reference, run_reference
from freezer.numerics import finite_difference, rms, same_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerFigure:
    """One output of one input set, by the eager model.

    Attributes:
        point: sizes of the named dims.
        low, high: range of the finite elements; None without any, and for complex and bool outputs.
        num_not_finite: elements that are NaN or Inf.
        relative_error: rms(e - r) / rms(r) against the float64 reference; None if it does not run, or nothing can be compared.
    """

    set_index: int
    point: Mapping[str, int]
    output: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    num_not_finite: int
    relative_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Debugged:
    """Result of `debug`.

    Attributes:
        figures: one for each output of each input set.
        facts: properties that matter to a freeze, one sentence each.
        warnings: likely mistakes.
    """

    figures: tuple[EagerFigure, ...]
    facts: tuple[str, ...]
    warnings: tuple[str, ...]


def debug(subject: Subject) -> Debugged:
    """Run the eager model over all input sets and a sequence of calls, as the judge does.

    Raises:
        JudgeError: it does not run, or its outputs cannot be judged.
    """
    reference = run_reference(subject)
    figures = tuple(
        _figure(subject, call.set_index, index, e, r, float64=reference.float64)
        for call in reference.singles
        for index, (e, r) in enumerate(zip(call.eager, call.reference, strict=True))
    )
    return Debugged(figures=figures, facts=tuple(_facts(subject, reference)), warnings=tuple(_warnings(subject, reference)))


def _figure(subject: Subject, set_index: int, index: int, e: Tensor, r: Tensor, *, float64: bool) -> EagerFigure:
    output = subject.outputs[index]
    floating = e.is_floating_point() or e.is_complex()
    finite = torch.isfinite(e)
    ordered = e[finite] if e.dtype != torch.bool and not e.is_complex() else e.new_empty(0)
    return EagerFigure(
        set_index=set_index,
        point=dict(subject.sets[set_index].point),
        output=output.name,
        shape=tuple(e.shape),
        dtype=output.dtype,
        low=float(ordered.min()) if ordered.numel() else None,
        high=float(ordered.max()) if ordered.numel() else None,
        num_not_finite=int((~finite).sum()),
        relative_error=_relative_error(e, r) if floating and float64 else None,
    )


def _relative_error(e: Tensor, r: Tensor) -> float | None:
    difference, reference = finite_difference(e, r)
    signal = rms(reference)
    return rms(difference) / signal if signal > 0 else None


def _facts(subject: Subject, reference: Reference) -> list[str]:
    return [
        "a call changes what later calls answer" if reference.stateful else "a call changes nothing that later calls see",
        "the same inputs give the same outputs" if reference.deterministic else "the same inputs give different outputs",
        "runs in float64, which drift is measured against" + (f": {reference.note}" if reference.note else "")
        if reference.float64
        else f"drift is measured against eager: {reference.why_not}",
        *([f"{subject.reset}() brings the initial state back"] if subject.reset else []),
    ]


def _warnings(subject: Subject, reference: Reference) -> list[str]:
    if not subject.spec.tensors or len(reference.singles) < 2:
        return []
    return [
        f"output {output.name!r} is the same for all input sets, so drift in it would not show; check the weights"
        for index, output in enumerate(subject.outputs)
        if _never_changes([call.eager[index] for call in reference.singles])
    ]


def _never_changes(outputs: Sequence[Tensor]) -> bool:
    first = outputs[0]
    return first.numel() > 0 and all(same_tensors(other, first) for other in outputs[1:])
