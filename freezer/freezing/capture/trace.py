"""The capture by torch.jit.trace, which is right only if the model's Python takes the same path for
all inputs.

A trace is refused if Python reads values that may differ for other inputs, or if its answers to
another input set differ from the model's. If Python reads sizes, it is refused as `trace` and tried
again after the script as `trace-sizes`, which compares it with the model at every declared size,
for at most 10 s.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import (
    Original,
    caller,
    check_answers,
    compare_call,
    eager_answer,
    first_lines,
    fresh_call,
)
from freezer.freezing.capture.program import (
    Captured,
    flat_form,
    lines_of,
    sizes_text,
    total_size,
)
from freezer.freezing.capture.value_reads import OF_SIZES, values_read
from freezer.freezing.diagnostics import sentence, warned_at
from freezer.freezing.models import Subject
from freezer.runtime.input_sets import InputSet
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import named_tensors
from freezer.spec import all_sizes, combinations, distinct

VALUES = "CP-TRACE-VALUES"

SIZES = "CP-TRACE-SIZES"
"""Code of a trace for a range of sizes that was not proven at all of them."""

SIZES_LIMIT_S = 10
"""Time for comparing a trace at further sizes."""

Warned = Sequence[warnings.WarningMessage]


def trace(original: Original, *, every_size: bool = False) -> Captured:
    """Trace a model.

    Args:
        original: the model.
        every_size: compare the trace at every declared size, instead of refusing it if Python reads
            sizes that vary.

    Raises:
        CaptureError: it cannot be traced, Python reads values of its tensors (code CP-TRACE-VALUES)
            or sizes (CP-TRACE-SIZES), or the trace differs for other inputs (CP-CAPTURE-DIFFERS).
    """
    subject = original.subject
    point = original.point
    example = subject.set_at(subject.spec.first_point() if point is None else point)
    program, caught = _traced(subject, example)
    size_lines = _refuse_reads(subject, example)
    size_lines += _iterations(caught)
    _restore(program, flat_form(subject))
    unchecked = check_answers("the trace", program, original, flat=True)
    largest = max(subject.sets, key=lambda input_set: total_size(input_set.point))
    if largest.point != example.point:  # where Python may read other values
        size_lines += _refuse_reads(subject, largest)
    notes: tuple[str, ...] = ()
    varies = any(dim.varies for dim in subject.spec.dims)
    if size_lines and varies and point is None:
        lines = first_lines(list(dict.fromkeys(size_lines)))
        reads = f"Python reads sizes {lines}, which a trace keeps for all sizes"
        if not every_size:
            raise CaptureError(f"{reads}; torch.jit.script is tried first", code=SIZES)
        number = _check_sizes(program, original)
        notes = (f"{reads}; at {number} sizes the answers match the model's.",)
    return Captured(
        name="trace-sizes" if every_size else "trace",
        program=program,
        convention="flat",
        warnings=(*lines_of(caught), *unchecked),
        notes=notes,
    )


def _trace(module: nn.Module, inputs: Sequence[Tensor]) -> ScriptModule:
    with torch.no_grad():
        traced = torch.jit.trace(module, tuple(inputs), check_trace=False)
    return cast(ScriptModule, traced)


def _traced(subject: Subject, input_set: InputSet) -> tuple[ScriptModule, Warned]:
    inputs = tuple(input_set.cloned().values())
    try:
        with (
            torchscript_deprecations_silenced(),
            warnings.catch_warnings(record=True, action="always") as caught,
        ):
            return _trace(flat_form(subject), inputs), caught
    except Exception as error:
        raise CaptureError(f"torch.jit.trace: {sentence(error, 'trace')}") from error


def _refuse_reads(subject: Subject, input_set: InputSet) -> list[str]:
    """Refuse a trace of an input set for which Python reads values of tensors; return the lines
    that read sizes.
    """
    inputs = tuple(input_set.tensors.values())
    try:
        with torchscript_deprecations_silenced():
            reads = values_read(lambda: flat_form(subject), _trace, inputs)
    except Exception as error:
        raise CaptureError(
            "torch.jit.trace: cannot determine whether Python reads values of tensors:"
            f" {sentence(error, 'trace')}"
        ) from error
    size_lines = reads.pop(OF_SIZES, [])
    if reads:
        lines = list(dict.fromkeys(chain.from_iterable(reads.values())))
        raise CaptureError(
            f"the trace would keep for all calls what Python reads of {' and '.join(reads)}"
            f" {first_lines(lines)}; use torch.where or torch.cond there, or write it so that"
            " torch.jit.script takes it",
            code=VALUES,
        )
    return size_lines


def _iterations(caught: Warned) -> list[str]:
    """The lines that iterate over a tensor, whose length the trace keeps."""
    return [
        warned_at(warning) or "a line of torch"
        for warning in caught
        if str(warning.message).startswith("Iterating over a tensor")
    ]


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Reset buffers and parameters to their initial state: tracing runs the model, which may change
    them.
    """
    before = dict(named_tensors(initial))
    with torch.no_grad():
        for name, tensor in named_tensors(program):
            value = before.get(name)
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)


def _check_sizes(program: nn.Module, original: Original) -> int:
    """Compare a trace for which Python read sizes with the model at every size of each dim, then at
    combinations of sizes, within SIZES_LIMIT_S; return the number of points that were compared.

    Raises:
        CaptureError: the trace differs, or cannot be compared at every size.
    """
    subject = original.subject
    eager = original.eager
    if not eager.deterministic:
        why = "a trace cannot be compared at every size with a model whose answers differ"
        raise CaptureError(why, code=SIZES)
    needed = all_sizes(subject.spec)
    points = distinct([*needed, *combinations(subject.spec)])
    ends = time.monotonic() + SIZES_LIMIT_S
    num_compared = 0
    for point in points:
        if time.monotonic() > ends:
            break
        if eager.stateful or num_compared == 0:
            model = caller(subject.fresh(), subject)
            call = fresh_call(program, original, flat=True)
        input_set = subject.further_set(point)
        name = sizes_text(point)
        expected = eager_answer(model, name, input_set)
        compare_call("the trace", name, call, input_set, expected, subject)
        num_compared += 1
    if num_compared < len(needed):
        raise CaptureError(
            f"the trace was compared at {num_compared} of {len(needed)} sizes within"
            f" {SIZES_LIMIT_S} s; declare fewer, or write forward so that torch.jit.script takes"
            " it",
            code=SIZES,
        )
    return num_compared
