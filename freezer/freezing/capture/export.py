"""Captures by torch.export, strict and not: programs for all sizes that the entry declares,
compared with the model.

torch.export treats a size of 1, and every type or attribute that Python inspects, as constant. So a
program is tried on every input set, and its guards on every declared size, before anything is built
from it.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.export import ExportedProgram

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import (
    DIFFERS,
    Original,
    check_answers,
    copy_of,
)
from freezer.freezing.capture.export_sizes import (
    FIXED,
    check_guards,
    guards_of,
    refusal,
)
from freezer.freezing.capture.program import (
    Captured,
    FlatModule,
    flat_form,
    lines_of,
    total_size,
)
from freezer.freezing.diagnostics import sentence
from freezer.freezing.models import Subject
from freezer.freezing.recipes import CaptureName
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import address_of, addresses_of, program_tensors
from freezer.spec import Dim, InputSpec, Point

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_COMPARED = re.compile(
    r"Could not guard on data-dependent expression (\w+ [<>=!]|Eq\(|Ne\()|^Constraints violated"
)
"""Branches on values, and fixed sizes, which strict tracing does not take either."""

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
"""Operators that write running statistics in training, which their schema omits."""


def export(original: Original, *, strict: bool = False) -> Captured:
    """Export a model that is not TorchScript.

    Raises:
        CaptureError: torch.export does not take the model, or takes fewer sizes than declared (code
            CP-EXPORT-DIMS), or the program differs from the model (code CP-CAPTURE-DIFFERS).
    """
    name: CaptureName = "export-strict" if strict else "export"
    return export_flat(partial(flat_form, original.subject), name, original)


def export_flat(fresh: Callable[[], FlatModule], name: CaptureName, original: Original) -> Captured:
    """Export the flat form of a model; see `export`. `fresh` makes it in its initial state."""
    spec = original.subject.spec
    if original.point is not None:
        spec = spec.at(original.point)
    exporter = _Exporter(
        fresh=fresh,
        strict=name == "export-strict",
        original=original,
        spec=spec,
    )
    example, program = exporter.first_that_works(_examples(original))
    unchecked = exporter.check(program)
    exporter.layouts = _other_layouts(program, example, original)
    if exporter.layouts:  # the other program is the one that serves
        _, program = exporter.first_that_works([example])
        unchecked = exporter.check(program)
    tensors = program_tensors(program)
    return Captured(
        name=name,
        program=program,
        convention="flat",
        mutates=changed_state(program),
        warnings=(*lines_of(exporter.caught), *unchecked),
        guards=guards_of(program, spec),
        owned=[each for each in tensors if address_of(each) in exporter.copies],
        inputs=spec.tensors,
    )


Layouts = Mapping[int, torch.memory_format]
"""Memory formats of outputs, by index."""


@dataclass(kw_only=True)
class _Exporter:
    """Calls torch.export.

    Attributes:
        fresh: makes the flat model in its initial state.
        layouts: the memory formats to give to outputs.
        caught: warnings so far.
        copies: memory addresses of the last program's tensors that are not the user's. torch.export
            takes tensors of Python modules, classes and closures without copying, and a model's own
            __deepcopy__ may share weights.
    """

    fresh: Callable[[], FlatModule]
    strict: bool
    original: Original
    spec: InputSpec
    layouts: Layouts = field(default_factory=dict)
    caught: list[warnings.WarningMessage] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)

    def first_that_works(self, examples: Sequence[InputSet]) -> tuple[InputSet, ExportedProgram]:
        """Export with the first example; with another only if a size came out as a constant."""
        for example in examples:
            try:
                return example, self._export(example)
            except Exception as error:
                if example is examples[-1] or FIXED not in str(error):
                    raise refusal(error, self.spec) from error
        raise AssertionError("no example")

    def check(self, program: ExportedProgram) -> tuple[str, ...]:
        """Check the sizes and answers of a program; return warnings."""
        if self.spec.dims:
            check_guards(program, self.spec)
        return check_answers(
            "the exported program",
            program.module(),
            self.original,
            flat=True,
        )

    def _export(self, example: InputSet) -> ExportedProgram:
        symbols = {dim.name: _symbol(dim) for dim in self.spec.dims if dim.varies}
        shapes = []
        for item in self.spec.tensors:
            sizes = enumerate(item.shape)
            shapes.append({axis: symbols[size] for axis, size in sizes if size in symbols})
        inputs = tuple(example.cloned().values())
        with torch.no_grad(), warnings.catch_warnings(record=True, action="always") as caught:
            module = self.fresh()
            module.layouts = self.layouts
            users = addresses_of(program_tensors(self.original.subject.model))
            self.copies = addresses_of(program_tensors(module)) - users
            program = torch.export.export(
                module,
                inputs,
                dynamic_shapes={"tensors": tuple(shapes)},
                strict=self.strict,
            )
        self.caught.extend(caught)
        return program


def strict_may_help(error: CaptureError) -> bool:
    """Whether tracing the bytecode may succeed after an error of torch.export.

    It treats types, NumPy and numbers read from tensors differently, but not branches on values or
    fixed sizes.
    """
    if error.code == DIFFERS:
        return True
    cause = error.__cause__
    return cause is not None and not _COMPARED.search(str(cause))


def _symbol(dim: Dim) -> object:
    """A dim as torch.export declares it."""
    step = dim.multiple_of
    if step == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    return step * torch.export.Dim(
        f"_{dim.name}",
        min=dim.min // step,
        max=dim.max // step,
    )


def _examples(original: Original) -> list[InputSet]:
    """The sets to export with: first one with small sizes above the minimum, since torch.export
    specializes on sizes 0 and 1; then the largest, since a size computed from a small one may be 1.
    """
    subject = original.subject
    if original.point is not None:
        return [subject.set_at(original.point)]

    def order(point: Point) -> tuple[int, int]:
        small = [dim for dim in subject.spec.dims if point[dim.name] < 2 * dim.multiple_of]
        return len(small), total_size(point)

    points = list(subject.spec.points())
    small = min(points, key=order)
    large = max(points, key=total_size)
    points = [small] if large == small else [small, large]
    return [subject.set_at(point) for point in points]


def _other_layouts(program: ExportedProgram, example: InputSet, original: Original) -> Layouts:
    """By index, eager's memory formats of outputs that the program lays out differently, such as
    nn.MultiheadAttention's without its fast path. Outputs without such a format are omitted.
    """
    eager = original.eager
    answers = zip(original.subject.sets, eager.first, strict=True)
    expected = next(answer for input_set, answer in answers if input_set is example)
    module: nn.Module = program.module()
    if eager.stateful or not eager.deterministic:
        module = copy_of(module)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        got = module(*example.cloned().values())
    layouts = {}
    for index, (output, right) in enumerate(zip(got, expected, strict=True)):
        layout = next((each for each in _LAYOUTS if right.is_contiguous(memory_format=each)), None)
        if layout is None or output.shape != right.shape:
            continue
        if not output.is_contiguous(memory_format=layout):
            layouts[index] = layout
    return layouts


def changed_state(program: ExportedProgram) -> list[str]:
    """Names of the buffers and parameters that a call changes.

    The signature names no changed buffer until the graph is functionalized, which takes seconds for
    a large model, so only graphs with operations in place are.

    Raises:
        CaptureError: torch.export cannot tell, for example because two buffers overlap in memory.
    """
    with warnings.catch_warnings(action="ignore"):
        if any(map(_writes, program.graph.nodes)):
            try:
                program = program.run_decompositions({})
            except Exception as error:
                why = sentence(error, "export")
                raise CaptureError(
                    f"torch.export cannot tell which tensors a call changes: {why}; register them"
                    " as buffers, each with memory of its own"
                ) from error
    signature = program.graph_signature
    parameters = getattr(signature, "parameters_to_mutate", {})  # missing in torch 2.11
    return sorted({*signature.buffers_to_mutate.values(), *parameters.values()})


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation may change its arguments; higher-order operations are assumed to."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in _NORMS:
        return bool(node.args[5])  # training
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def export_at(subject: Subject, input_set: InputSet) -> ExportedProgram:
    """The exported program of a model for one input set, not compared with the model.

    Raises:
        CaptureError: torch.export does not take the model.
    """
    spec = subject.spec.at(input_set.point) if input_set.point else subject.spec
    inputs = tuple(input_set.cloned().values())
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for strict in (False, True):
            try:
                return torch.export.export(flat_form(subject), inputs, strict=strict)
            except Exception as error:
                if strict:
                    raise refusal(error, spec) from error
    raise AssertionError("both ways end above")
