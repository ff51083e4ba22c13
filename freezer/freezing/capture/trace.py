"""The capture by torch.jit.trace, which is right only if the model's Python takes the same path for all inputs.

A trace is refused if Python reads values that may differ for other inputs, if its answers to another input set differ from the
model's, or if another set of the same sizes gives another graph. A graph that differs only between sizes, while all answers agree,
is kept with a note of the difference.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import (
    DIFFERS,
    Call,
    EagerAnswers,
    check_answers,
    first_lines,
    flat_call,
    kept_values,
    place_of,
)
from freezer.freezing.capture.program import Captured, FlatModule, lines_of
from freezer.freezing.capture.trace_graph import Line, difference, lines_of_graph, shortened
from freezer.freezing.capture.value_reads import Reads, values_read
from freezer.freezing.diagnostics.messages import code_of, trace_sentence
from freezer.freezing.models.subject import Subject
from freezer.runtime.input_sets import InputSet
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

VALUES = "CP-TRACE-VALUES"

NUM_COMPARED = 2
"""The number of other input sets whose graphs are compared."""

MANY_LINES = 20_000
"""From this many operations, only one other set of the same sizes is compared."""

DIFF = "trace-diff.txt"


def trace(subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]) -> Captured:
    """Trace a model.

    Raises:
        CaptureError: it cannot be traced, Python reads values of its tensors (code CP-TRACE-VALUES), or the trace differs for
            other inputs (code CP-TRACE-DIFFERS).
    """
    example = subject.set_at(point if point is not None else subject.spec.first_point())
    tensors = tuple(example.tensors.values())
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = _traced(_flat(subject), tensors)
    except Exception as error:
        raise CaptureError(f"torch.jit.trace: {trace_sentence(error)}", code=code_of(error)) from error
    _refuse_reads(_reads(subject, tensors))
    graphs = _Graphs(subject, example, program)
    _restore(program, FlatModule(subject.fresh(), subject.spec))
    unchecked = _check_answers(program, subject, eager(), caught, graphs)
    notes, texts = _compare(graphs, compared=not unchecked)
    return Captured(
        name="trace", program=program, convention="flat", warnings=(*lines_of(caught), *unchecked), notes=notes, texts=texts
    )


def _flat(subject: Subject) -> nn.Module:
    return FlatModule(subject.fresh(), subject.spec).eval()


def _traced(module: nn.Module, tensors: Sequence[Tensor]) -> Any:
    with torch.no_grad(), torchscript_deprecations_silenced():
        return torch.jit.trace(module, tuple(tensor.clone() for tensor in tensors), check_trace=False)


def _reads(subject: Subject, tensors: Sequence[Tensor]) -> Reads:
    def traced_as_given(module: nn.Module, given: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch.jit.trace(module, tuple(given), check_trace=False)

    try:
        with torchscript_deprecations_silenced():
            return values_read(lambda: _flat(subject), traced_as_given, tensors)
    except Exception as error:
        raise CaptureError(
            f"torch.jit.trace: cannot determine whether Python reads values of tensors: {trace_sentence(error)}"
        ) from error


def _refuse_reads(reads: Reads) -> None:
    if not reads:
        return
    kinds = {"its inputs": reads.inputs, "state that a call changes": reads.state, "random numbers": reads.random}
    found = {kind: lines for kind, lines in kinds.items() if lines}
    lines = list(dict.fromkeys(line for several in found.values() for line in several))
    raise CaptureError(
        f"the trace would keep for all calls what Python reads of {' and '.join(found)} {first_lines(lines)}; use torch.where or "
        "torch.cond there, or write it so that torch.jit.script takes it",
        code=VALUES,
    )


def _restore(program: nn.Module, initial: nn.Module) -> None:
    """Reset buffers and parameters to their initial state: tracing runs the model, which may change them."""
    before = {**dict(initial.named_buffers()), **dict(initial.named_parameters())}
    with torch.no_grad():
        for name, tensor in (*program.named_buffers(), *program.named_parameters()):
            if name in before and before[name].shape == tensor.shape:
                tensor.copy_(before[name])


class _Graphs:
    """The graph of the example, compared with those of other input sets, which are traced on demand."""

    def __init__(self, subject: Subject, example: InputSet, program: Any) -> None:
        self.subject, self.example = subject, example
        self._names = [item.name for item in subject.spec.tensors]
        self.lines: Sequence[Line] = lines_of_graph(program, self._names)

    def difference(self, item: InputSet) -> str:
        """The diff between the example's graph and a set's; empty if they are the same."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = lines_of_graph(_traced(_flat(self.subject), tuple(item.tensors.values())), self._names)
        except Exception as error:
            return f"--- {self.place(self.example)}\n+++ {self.place(item)}\n@@ @@\n+tracing failed: {trace_sentence(error)}\n"
        return difference(self.lines, other, self.place(self.example), self.place(item))

    def place(self, item: InputSet) -> str:
        """The name of a set."""
        return place_of(next(index for index, other in enumerate(self.subject.sets) if other is item), item)


def _check_answers(
    program: Any, subject: Subject, eager: EagerAnswers, caught: Sequence[warnings.WarningMessage], graphs: _Graphs
) -> tuple[str, ...]:
    """Compare the trace's answers with the model's; see `check_answers`. The program keeps its state."""
    diffs: list[str] = []

    def fresh() -> Call:
        with torch.no_grad():  # see cloning.copied
            return flat_call(program if eager.second is None else copy.deepcopy(program))

    def why(item: InputSet) -> str:
        if item is not graphs.example and (diff := graphs.difference(item)):
            diffs.append(diff)
            return f"{kept_values(caught)}; there the graph differs: {shortened(diff)}"
        return kept_values(caught)

    try:
        return check_answers("the trace", fresh, subject, eager, why=why)
    except CaptureError as error:
        for diff in diffs:
            error.add_note(diff)
        raise


def _compare(graphs: _Graphs, *, compared: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Notes and texts on graphs that differ between sizes.

    Args:
        graphs: graphs of the trace.
        compared: whether the trace was compared with the model, and agrees.

    Raises:
        CaptureError: two sets of the same sizes have different graphs, or Python reads values where a graph differs.
    """
    example = graphs.example
    others = [item for item in graphs.subject.sets if item is not example]
    same = [item for item in others if dict(item.point) == dict(example.point)][:1]
    for item in same:
        if diff := graphs.difference(item):
            error = CaptureError(
                f"the trace of {graphs.place(item)} differs from the trace of {graphs.place(example)}, which has the same "
                f"sizes: {shortened(diff)}",
                code=DIFFERS,
            )
            error.add_note(diff)
            raise error
    by_size = {tuple(item.point.values()): item for item in reversed(others) if dict(item.point) != dict(example.point)}
    sizes = sorted(by_size.values(), key=lambda item: -sum(item.point.values()))
    most = 0 if len(graphs.lines) >= MANY_LINES else NUM_COMPARED - len(same)
    differing = {}
    for item in sizes[:most]:
        if diff := graphs.difference(item):
            differing[graphs.place(item)] = diff
            _refuse_reads(_reads(graphs.subject, tuple(item.tensors.values())))  # Python takes another path there
    both = ", and both answer like the model" if compared else ""
    notes = tuple(
        f"the graph of {place} differs from that of {graphs.place(example)}{both}: {shortened(diff)}"
        for place, diff in differing.items()
    )
    return notes, {DIFF: "\n".join(differing.values())} if differing else {}
