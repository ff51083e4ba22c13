"""The capture by torch.jit.trace, which is right only if the model's Python takes the same path for all inputs.

A trace is refused if Python reads values that may differ for other inputs, if its answers to another input set differ from the
model's, or if another set of the same sizes gives another graph.
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
from freezer.files.digest import digest_bytes
from freezer.freezing.capture.equivalence import DIFFERS, Call, EagerAnswers, check_answers, first_lines, flat_call, place_of
from freezer.freezing.capture.program import Captured, FlatModule, lines_of
from freezer.freezing.capture.value_reads import values_read
from freezer.freezing.diagnostics.messages import code_of, trace_sentence
from freezer.freezing.diagnostics.source_lines import line_of_node, warned_at
from freezer.freezing.models.subject import Subject
from freezer.runtime.input_sets import InputSet
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.tensors import bytes_of, dense_parts, memory_of

VALUES = "CP-TRACE-VALUES"


def trace(subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]) -> Captured:
    """Trace a model.

    Raises:
        CaptureError: it cannot be traced, Python reads values of its tensors (code CP-TRACE-VALUES), or the trace differs for
            other inputs (code CP-TRACE-DIFFERS).
    """
    example = subject.set_at(point if point is not None else subject.spec.first_point())
    program, caught = _traced(subject, example)
    _refuse_reads(subject, example)
    _restore(program, FlatModule(subject.fresh(), subject.spec))
    unchecked = _check_answers(program, subject, eager(), caught)
    _check_graphs(program, subject, example)
    return Captured(name="trace", program=program, convention="flat", warnings=(*lines_of(caught), *unchecked))


def _flat(subject: Subject) -> nn.Module:
    return FlatModule(subject.fresh(), subject.spec).eval()


def _traced(subject: Subject, item: InputSet) -> tuple[Any, Sequence[warnings.WarningMessage]]:
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return torch.jit.trace(_flat(subject), tuple(item.cloned().values()), check_trace=False), caught
    except Exception as error:
        raise CaptureError(f"torch.jit.trace: {trace_sentence(error)}", code=code_of(error)) from error


def _refuse_reads(subject: Subject, item: InputSet) -> None:
    """Refuse a trace of an input set for which Python reads values of tensors."""

    def traced_as_given(module: nn.Module, given: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch.jit.trace(module, tuple(given), check_trace=False)

    try:
        with torchscript_deprecations_silenced():
            reads = values_read(lambda: _flat(subject), traced_as_given, tuple(item.tensors.values()))
    except Exception as error:
        raise CaptureError(
            f"torch.jit.trace: cannot determine whether Python reads values of tensors: {trace_sentence(error)}"
        ) from error
    if reads:
        lines = list(dict.fromkeys(line for several in reads.values() for line in several))
        raise CaptureError(
            f"the trace would keep for all calls what Python reads of {' and '.join(reads)} {first_lines(lines)}; use torch.where "
            "or torch.cond there, or write it so that torch.jit.script takes it",
            code=VALUES,
        )


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Reset buffers and parameters to their initial state: tracing runs the model, which may change them."""
    before = {**dict(initial.named_buffers()), **dict(initial.named_parameters())}
    with torch.no_grad():
        for name, tensor in (*program.named_buffers(), *program.named_parameters()):
            if name in before and before[name].shape == tensor.shape:
                tensor.copy_(before[name])


def _check_answers(
    program: Any, subject: Subject, eager: EagerAnswers, caught: Sequence[warnings.WarningMessage]
) -> tuple[str, ...]:
    """Compare the trace's answers with the model's; see `check_answers`. The program keeps its state."""

    def fresh() -> Call:
        with torch.no_grad():  # see calls.copied
            return flat_call(program if eager.second is None else copy.deepcopy(program))

    warned = (warned_at(item) for item in caught if issubclass(item.category, TracerWarning))
    lines = list(dict.fromkeys(line for line in warned if line))
    why = f", since a trace keeps the values of its example {first_lines(lines)}" if lines else ""
    return check_answers("the trace", fresh, subject, eager, why=lambda _: why)


def _check_graphs(program: Any, subject: Subject, example: InputSet) -> None:
    """Trace another set of the same sizes, whose graph must be the same, and the largest, where Python may read other values."""
    others = [(index, item) for index, item in enumerate(subject.sets) if item is not example]
    for index, item in [found for found in others if dict(found[1].point) == dict(example.point)][:1]:
        if difference := _difference(program, _traced(subject, item)[0]):
            first = next(index for index, item in enumerate(subject.sets) if item is example)
            raise CaptureError(
                f"the trace of {place_of(index, item)} differs from the trace of {place_of(first, example)}, which has the same "
                f"sizes: {difference}",
                code=DIFFERS,
            )
    _, largest = max(others, key=lambda found: sum(found[1].point.values()), default=(0, example))
    if dict(largest.point) != dict(example.point) and _difference(program, _traced(subject, largest)[0]):
        _refuse_reads(subject, largest)


def _difference(one: Any, other: Any) -> str:
    """The first operation that differs between two traces, with the user's line; empty if their graphs are the same."""
    ones, others = _operations(one), _operations(other)
    for (text, line), (text_of_other, _) in zip(ones, others, strict=False):
        if text != text_of_other:
            return f"`{text_of_other}`, expected `{text}`" + (f" at {line}" if line else "")
    return "" if len(ones) == len(others) else f"{len(others)} operations, expected {len(ones)}"


def _operations(program: Any) -> list[tuple[str, str]]:
    """The operations of a trace that a result needs, with the user's lines. Constants count with all their bytes, sizes do not."""
    graph = program.inlined_graph
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_erase_shape_information(graph)
    graph = torch._C._jit_pass_canonicalize(graph, False)
    found = []
    for node in graph.nodes():
        text = re.sub(r" # \S+:\d+:\d+| : .*?(?=, %| = )", "", str(node)).strip()  # without places and types
        value = node.output().toIValue() if node.kind() == "prim::Constant" else None
        if isinstance(value, Tensor):
            parts = [bytes_of(part) for part in dense_parts(value)]
            text = f"tensor {digest_bytes(b''.join(bytes(memory_of(part)) for part in parts))}"
        found.append((text, line_of_node(node.sourceRange()) or ""))
    return found
