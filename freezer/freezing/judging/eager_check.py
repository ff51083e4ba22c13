"""Run the eager model on the input sets of a freeze, with every check that needs no graph; for
`coldpress freeze --debug`.

Nothing is captured or written. The command disables TorchScript (PYTORCH_JIT=0), so that debuggers
work in scripted functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.compare import DIGITS, distances
from freezer.compare.tensor_values import comparable, same_tensors, values_of
from freezer.freezing.drift import Reference, run_reference
from freezer.freezing.models import Subject
from freezer.spec import OutputSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerFigure:
    """One output of one input set, by the eager model.

    Attributes:
        point: sizes of the named dims.
        low, high: range of the finite elements; None without any, and for complex and bool outputs.
        num_not_finite: elements that are NaN or Inf.
        relative_error: rmse / rms(r) against the float64 reference without fill values; None if
            nothing can be compared.
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
    singles = reference.singles
    figures = tuple(
        _figure(
            subject,
            call.set_index,
            output,
            e,
            r if reference.float64 else None,
            limits,
        )
        for call in singles
        for output, e, r, limits in zip(
            subject.outputs,
            call.eager,
            call.reference,
            reference.scales,
            strict=True,
        )
    )
    return Debugged(
        figures=figures,
        facts=tuple(_facts(subject, reference)),
        warnings=(*_constant_outputs(subject, reference), *_without_digits(reference, figures)),
    )


def _constant_outputs(subject: Subject, reference: Reference) -> Iterator[str]:
    """Warn of outputs that are the same for all input sets."""
    singles = reference.singles
    if not subject.spec.tensors or len(singles) < 2:
        return
    for number, output in enumerate(subject.outputs):
        first, *others = (call.eager[number] for call in singles)
        if first.numel() and all(same_tensors(first, other) for other in others):
            yield (
                f"output {output.name!r} is the same for all input sets, so drift in it would not"
                " show; check the weights"
            )


def _without_digits(reference: Reference, figures: Sequence[EagerFigure]) -> list[str]:
    """Warn of outputs in which eager has no correct digits."""
    if not reference.float64 or not reference.deterministic:
        return []
    worst: dict[str, float] = {}
    for figure in figures:
        error = figure.relative_error
        if error is not None and error > DIGITS:
            worst[figure.output] = error
    return [
        f"output {name!r}: eager has no correct digits, its relative error is {error:.2g}"
        for name, error in worst.items()
    ]


def _figure(
    subject: Subject,
    set_index: int,
    output: OutputSpec,
    e: Tensor,
    r: Tensor | None,
    limits: Sequence[float],
) -> EagerFigure:
    finite = torch.isfinite(e)
    ordered = e[finite] if e.dtype != torch.bool and not e.is_complex() else e.new_empty(0)
    rmse = size = 0.0
    if r is not None and comparable(e):
        small = distances(values_of(r), values_of(e), limits=limits)[0]
        rmse, size = small.rmse, small.rms
    return EagerFigure(
        set_index=set_index,
        point=dict(subject.sets[set_index].point),
        output=output.name,
        shape=tuple(e.shape),
        dtype=output.dtype,
        low=float(ordered.min()) if ordered.numel() else None,
        high=float(ordered.max()) if ordered.numel() else None,
        num_not_finite=int((~finite).sum()),
        relative_error=rmse / size if size > 0 else None,
    )


def _facts(subject: Subject, reference: Reference) -> list[str]:
    measured = "runs in float64, which drift is measured against"
    if not reference.float64:
        measured = f"drift is measured against eager: {reference.note}"
    return [
        (
            "a call changes what later calls answer"
            if reference.stateful
            else "a call changes nothing that later calls see"
        ),
        (
            "the same inputs give the same outputs"
            if reference.deterministic
            else "the same inputs give different outputs"
        ),
        measured,
        *([f"{subject.reset}() brings the initial state back"] if subject.reset else []),
    ]
