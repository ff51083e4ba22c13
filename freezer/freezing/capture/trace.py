"""The capture by torch.jit.trace, which is right only if the model's Python takes the same path for
all inputs.

A trace is refused if Python reads values that may differ for other inputs, if its answers to
another input set differ from the model's, or if another set of the same sizes gives another graph.
If Python reads sizes, it is refused as `trace` and tried again after the script as `trace-sizes`,
which compares it with the model at every declared size, for at most 10 s.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from freezer.errors import CaptureError
from freezer.files import digest_bytes
from freezer.freezing.capture.equivalence import (
    DIFFERS,
    SIZES,
    Original,
    ProgramCall,
    check_answers,
    check_sizes,
    first_lines,
    flat_call,
    set_name,
)
from freezer.freezing.capture.program import Captured, FlatModule, lines_of, total_size
from freezer.freezing.capture.value_reads import OF_SIZES, values_read
from freezer.freezing.diagnostics import line_of_node, trace_sentence, warned_at
from freezer.freezing.models import Subject
from freezer.runtime.input_sets import InputSet
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import bytes_of, dense_parts, memory_of
from freezer.spec import all_sizes, combinations, distinct

VALUES = "CP-TRACE-VALUES"

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
    subject, point = original.subject, original.point
    example = subject.set_at(subject.spec.first_point() if point is None else point)
    program, caught = _traced(subject, example)
    size_lines = [*_refuse_reads(subject, example), *_iterations(caught)]
    _restore(program, FlatModule(subject.fresh(), subject.spec))
    unchecked = check_answers(
        "the trace", _fresh_calls(program, original), original, why=lambda _: _kept_values(caught)
    )
    _check_graphs(program, subject, example)
    notes: tuple[str, ...] = ()
    if size_lines and point is None and any(dim.min < dim.max for dim in subject.spec.dims):
        notes = _check_sizes(program, original, size_lines, every_size=every_size)
    return Captured(
        name="trace-sizes" if every_size else "trace",
        program=program,
        convention="flat",
        warnings=(*lines_of(caught), *unchecked),
        notes=notes,
    )


def _flat(subject: Subject) -> nn.Module:
    return FlatModule(subject.fresh(), subject.spec).eval()


def _trace(module: nn.Module, inputs: Sequence[Tensor]) -> torch.jit.ScriptModule:
    with torch.no_grad():
        traced = torch.jit.trace(module, tuple(inputs), check_trace=False)
    return cast(torch.jit.ScriptModule, traced)


def _traced(subject: Subject, input_set: InputSet) -> tuple[torch.jit.ScriptModule, Warned]:
    try:
        with torchscript_deprecations_silenced(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return _trace(_flat(subject), tuple(input_set.cloned().values())), caught
    except Exception as error:
        raise CaptureError(f"torch.jit.trace: {trace_sentence(error)}") from error


def _refuse_reads(subject: Subject, input_set: InputSet) -> list[str]:
    """Refuse a trace of an input set for which Python reads values of tensors; return the lines
    that read sizes.
    """
    try:
        with torchscript_deprecations_silenced():
            reads = values_read(lambda: _flat(subject), _trace, tuple(input_set.tensors.values()))
    except Exception as error:
        raise CaptureError(
            "torch.jit.trace: cannot determine whether Python reads values of tensors:"
            f" {trace_sentence(error)}"
        ) from error
    size_lines = reads.pop(OF_SIZES, [])
    if reads:
        lines = list(dict.fromkeys(itertools.chain(*reads.values())))
        raise CaptureError(
            f"the trace would keep for all calls what Python reads of {' and '.join(reads)}"
            f" {first_lines(lines)}; use torch.where or torch.cond there, or write it so that"
            " torch.jit.script takes it",
            code=VALUES,
        )
    return size_lines


def _iterations(caught: Warned) -> list[str]:
    """The lines that iterate over a tensor, whose length the trace keeps."""
    lines = [
        warned_at(warning) or "a line of torch"
        for warning in caught
        if str(warning.message).startswith("Iterating over a tensor")
    ]
    return list(dict.fromkeys(lines))


def _kept_values(caught: Warned) -> str:
    """A likely reason for a difference: the user's lines of which the tracer warned."""
    warned = [warned_at(one) for one in caught if issubclass(one.category, TracerWarning)]
    lines = list(dict.fromkeys(filter(None, warned)))
    return f", since a trace keeps the values of its example {first_lines(lines)}" if lines else ""


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Reset buffers and parameters to their initial state: tracing runs the model, which may change
    them.
    """
    before = {**dict(initial.named_buffers()), **dict(initial.named_parameters())}
    with torch.no_grad():
        for name, tensor in (*program.named_buffers(), *program.named_parameters()):
            if name in before and before[name].shape == tensor.shape:
                tensor.copy_(before[name])


def _fresh_calls(program: torch.jit.ScriptModule, original: Original) -> Callable[[], ProgramCall]:
    """Makes the program in its initial state: a copy if the model is stateful."""

    def fresh() -> ProgramCall:
        with torch.no_grad():  # see models.copied
            return flat_call(program if original.eager.second is None else copy.deepcopy(program))

    return fresh


def _check_sizes(
    program: torch.jit.ScriptModule, original: Original, lines: Sequence[str], *, every_size: bool
) -> tuple[str, ...]:
    """Compare a trace for which Python read sizes with the model at every declared size; return a
    note on it.

    Raises:
        CaptureError: the trace differs, or is not to be compared, or cannot be.
    """
    found = f"Python reads sizes {first_lines(lines)}, which a trace keeps for all sizes"
    if not every_size:
        raise CaptureError(f"{found}; torch.jit.script is tried first", code=SIZES)
    spec = original.subject.spec
    needed = all_sizes(spec)
    points = distinct([*needed, *combinations(spec)])
    number = check_sizes(_fresh_calls(program, original), original, points, len(needed))
    return (f"{found}; at {number} sizes the answers match the model's.",)


def _check_graphs(program: torch.jit.ScriptModule, subject: Subject, example: InputSet) -> None:
    """Trace another set of the same sizes, whose graph must be the same, and the largest, where
    Python may read other values.
    """
    sets = subject.sets
    first = next(index for index, input_set in enumerate(sets) if input_set is example)
    for index, other in enumerate(sets):
        if index == first or dict(other.point) != dict(example.point):
            continue
        difference = _difference(program, _traced(subject, other)[0])
        if difference:
            raise CaptureError(
                f"the trace of {set_name(index, other)} differs from the trace of"
                f" {set_name(first, example)}, which has the same sizes: {difference}",
                code=DIFFERS,
            )
        break
    others = [input_set for input_set in sets if input_set is not example]
    largest = max(others, key=lambda one: total_size(one.point), default=example)
    if dict(largest.point) == dict(example.point):
        return
    if _difference(program, _traced(subject, largest)[0]):
        _refuse_reads(subject, largest)


def _difference(program: torch.jit.ScriptModule, other: torch.jit.ScriptModule) -> str:
    """The first operation that differs between two traces, with the user's line; empty if their
    graphs are the same.
    """
    operations, others = _operations(program), _operations(other)
    for (text, line), (text_of_other, _) in zip(operations, others, strict=False):
        if text != text_of_other:
            at = f" at {line}" if line else ""
            return f"`{text_of_other}`, expected `{text}`{at}"
    if len(operations) != len(others):
        return f"{len(others)} operations, expected {len(operations)}"
    return ""


def _operations(program: torch.jit.ScriptModule) -> list[tuple[str, str]]:
    """The operations of a trace that a result needs, with the user's lines.

    Constants count with all their bytes, sizes do not.
    """
    graph = program.inlined_graph
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_erase_shape_information(graph)
    graph = torch._C._jit_pass_canonicalize(graph, False)
    operations = []
    for node in graph.nodes():
        # without places and types
        text = re.sub(r" # \S+:\d+:\d+| : .*?(?=, %| = )", "", str(node)).strip()
        value = node.output().toIValue() if node.kind() == "prim::Constant" else None
        if isinstance(value, Tensor):
            data = [bytes(memory_of(bytes_of(part))) for part in dense_parts(value)]
            text = f"tensor {digest_bytes(b''.join(data))}"
        operations.append((text, line_of_node(node.sourceRange()) or ""))
    return operations
