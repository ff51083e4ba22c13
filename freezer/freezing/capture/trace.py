"""The capture by torch.jit.trace, which is right only if the model's Python takes the same path for
all inputs.

A trace is refused if Python reads values that may differ for other inputs, if its answers to
another input set differ from the model's, or if another set of the same sizes gives another graph.
If Python reads sizes, it is refused as `trace` and tried again after the script as `trace-sizes`,
which compares it at every declared size.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from freezer.errors import CaptureError
from freezer.files import digest_bytes
from freezer.freezing.capture.equivalence import (
    DIFFERS,
    SIZES,
    EagerAnswers,
    ProgramCall,
    check_answers,
    check_sizes,
    first_lines,
    flat_call,
    place_of,
)
from freezer.freezing.capture.program import Captured, FlatModule, lines_of
from freezer.freezing.capture.value_reads import OF_SIZES, same_reads, values_read
from freezer.freezing.diagnostics.messages import code_of, trace_sentence
from freezer.freezing.diagnostics.source_lines import line_of_node, warned_at
from freezer.freezing.models import Subject
from freezer.runtime.input_sets import InputSet
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import bytes_of, dense_parts, memory_of
from freezer.spec import all_sizes, combinations, distinct

VALUES = "CP-TRACE-VALUES"


def trace(
    subject: Subject,
    point: Mapping[str, int] | None,
    eager: Callable[[], EagerAnswers],
    *,
    every_size: bool = False,
) -> Captured:
    """Trace a model.

    Args:
        subject, point, eager: see capture.py.
        every_size: compare the trace at every declared size, instead of refusing it if Python reads
            sizes that vary.

    Raises:
        CaptureError: it cannot be traced, Python reads values of its tensors (code CP-TRACE-VALUES)
            or sizes (CP-TRACE-SIZES), or the trace differs for other inputs (CP-TRACE-DIFFERS).
    """
    example = subject.set_at(point if point is not None else subject.spec.first_point())
    program, caught = _traced(subject, example)
    size_lines = [*_refuse_reads(subject, example), *_iterations(caught)]
    _restore(program, FlatModule(subject.fresh(), subject.spec))
    unchecked = _check_answers(program, subject, eager(), caught)
    _check_graphs(program, subject, example)
    notes: tuple[str, ...] = ()
    if size_lines and point is None and any(dim.min < dim.max for dim in subject.spec.dims):
        notes = _check_sizes(program, subject, eager(), size_lines, every_size=every_size)
    return Captured(
        name="trace-sizes" if every_size else "trace",
        program=program,
        convention="flat",
        warnings=(*lines_of(caught), *unchecked),
        notes=notes,
    )


def _flat(subject: Subject) -> nn.Module:
    return FlatModule(subject.fresh(), subject.spec).eval()


def _traced(subject: Subject, item: InputSet) -> tuple[Any, Sequence[warnings.WarningMessage]]:
    try:
        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            return (
                torch.jit.trace(_flat(subject), tuple(item.cloned().values()), check_trace=False),
                caught,
            )
    except Exception as error:
        raise CaptureError(
            f"torch.jit.trace: {trace_sentence(error)}", code=code_of(error)
        ) from error


def _refuse_reads(subject: Subject, item: InputSet) -> list[str]:
    """Refuse a trace of an input set for which Python reads values of tensors; return the lines
    that read sizes.
    """

    def traced_as_given(module: nn.Module, given: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch.jit.trace(module, tuple(given), check_trace=False)

    try:
        with torchscript_deprecations_silenced():
            reads = values_read(
                lambda: _flat(subject), traced_as_given, tuple(item.tensors.values())
            )
    except Exception as error:
        raise CaptureError(
            "torch.jit.trace: cannot determine whether Python reads values of tensors:"
            f" {trace_sentence(error)}"
        ) from error
    size_lines = reads.pop(OF_SIZES, [])
    if reads:
        lines = list(dict.fromkeys(line for several in reads.values() for line in several))
        raise CaptureError(
            f"the trace would keep for all calls what Python reads of {' and '.join(reads)}"
            f" {first_lines(lines)}; use torch.where or torch.cond there, or write it so that"
            " torch.jit.script takes it",
            code=VALUES,
        )
    return size_lines


def _iterations(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """The lines that iterate over a tensor, whose length the trace keeps."""
    found = (item for item in caught if str(item.message).startswith("Iterating over a tensor"))
    return list(dict.fromkeys(warned_at(item) or "a line of torch" for item in found))


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Reset buffers and parameters to their initial state: tracing runs the model, which may change
    them.
    """
    before = {**dict(initial.named_buffers()), **dict(initial.named_parameters())}
    with torch.no_grad():
        for name, tensor in (*program.named_buffers(), *program.named_parameters()):
            if name in before and before[name].shape == tensor.shape:
                tensor.copy_(before[name])


def _check_answers(
    program: Any, subject: Subject, eager: EagerAnswers, caught: Sequence[warnings.WarningMessage]
) -> tuple[str, ...]:
    """Compare the trace's answers with the model's; see `check_answers`.

    The program keeps its state.
    """
    warned = (warned_at(item) for item in caught if issubclass(item.category, TracerWarning))
    lines = list(dict.fromkeys(line for line in warned if line))
    why = f", since a trace keeps the values of its example {first_lines(lines)}" if lines else ""
    return check_answers(
        "the trace", _fresh_calls(program, eager), subject, eager, why=lambda _: why
    )


def _fresh_calls(program: Any, eager: EagerAnswers) -> Callable[[], ProgramCall]:
    """Makes the program in its initial state: a copy if the model is stateful."""

    def fresh() -> ProgramCall:
        with torch.no_grad():  # see calls.copied
            return flat_call(program if eager.second is None else copy.deepcopy(program))

    return fresh


def _check_sizes(
    program: Any, subject: Subject, eager: EagerAnswers, lines: Sequence[str], *, every_size: bool
) -> tuple[str, ...]:
    """Check a trace for which Python read sizes at every declared size; return a note on it.

    Where Python reads the same as for the example, the trace is right. Elsewhere it is compared
    with the model.

    Raises:
        CaptureError: the trace differs, or is not to be compared, or cannot be.
    """
    found = f"Python reads sizes {first_lines(lines)}, which a trace keeps for all sizes"
    if not every_size:
        raise CaptureError(f"{found}; torch.jit.script is tried first", code=SIZES)

    def sized(point: Mapping[str, int]) -> list[Tensor]:
        return [
            torch.empty(item.at(point), dtype=getattr(torch, item.dtype), device="meta")
            for item in subject.spec.tensors
        ]

    with torchscript_deprecations_silenced():
        same = same_reads(_flat(subject), sized(subject.spec.first_point()))
    needed = all_sizes(subject.spec)
    points = distinct([*needed, *combinations(subject.spec)])
    fresh = _fresh_calls(program, eager)
    number = check_sizes(
        fresh, subject, eager, points, len(needed), lambda point: same(sized(point))
    )
    return (f"{found}; at {number} sizes it reads the same, or the answers match the model's.",)


def _check_graphs(program: Any, subject: Subject, example: InputSet) -> None:
    """Trace another set of the same sizes, whose graph must be the same, and the largest, where
    Python may read other values.
    """
    others = [(index, item) for index, item in enumerate(subject.sets) if item is not example]
    for index, item in [found for found in others if dict(found[1].point) == dict(example.point)][
        :1
    ]:
        if difference := _difference(program, _traced(subject, item)[0]):
            first = next(index for index, item in enumerate(subject.sets) if item is example)
            raise CaptureError(
                f"the trace of {place_of(index, item)} differs from the trace of"
                f" {place_of(first, example)}, which has the same sizes: {difference}",
                code=DIFFERS,
            )
    _, largest = max(others, key=lambda found: sum(found[1].point.values()), default=(0, example))
    if dict(largest.point) != dict(example.point) and _difference(
        program, _traced(subject, largest)[0]
    ):
        _refuse_reads(subject, largest)


def _difference(one: Any, other: Any) -> str:
    """The first operation that differs between two traces, with the user's line; empty if their
    graphs are the same.
    """
    ones, others = _operations(one), _operations(other)
    for (text, line), (text_of_other, _) in zip(ones, others, strict=False):
        if text != text_of_other:
            return f"`{text_of_other}`, expected `{text}`" + (f" at {line}" if line else "")
    return "" if len(ones) == len(others) else f"{len(others)} operations, expected {len(ones)}"


def _operations(program: Any) -> list[tuple[str, str]]:
    """The operations of a trace that a result needs, with the user's lines.

    Constants count with all their bytes, sizes do not.
    """
    graph = program.inlined_graph
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_erase_shape_information(graph)
    graph = torch._C._jit_pass_canonicalize(graph, False)
    found = []
    for node in graph.nodes():
        text = re.sub(
            r" # \S+:\d+:\d+| : .*?(?=, %| = )", "", str(node)
        ).strip()  # without places and types
        value = node.output().toIValue() if node.kind() == "prim::Constant" else None
        if isinstance(value, Tensor):
            parts = [bytes_of(part) for part in dense_parts(value)]
            text = f"tensor {digest_bytes(b''.join(bytes(memory_of(part)) for part in parts))}"
        found.append((text, line_of_node(node.sourceRange()) or ""))
    return found
