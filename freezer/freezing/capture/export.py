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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
from freezer.freezing.capture.program import Captured, FlatModule, lines_of, total_size
from freezer.freezing.diagnostics import sentence
from freezer.freezing.recipes import CaptureName
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import address_of, addresses_of, program_tensors
from freezer.spec import Dim, InputSpec, TensorSpec

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
    subject = original.subject

    def fresh() -> FlatModule:
        module = FlatModule(subject.fresh(), subject.spec)
        module.eval()
        return module

    return export_flat(fresh, "export-strict" if strict else "export", original)


def export_flat(fresh: Callable[[], FlatModule], name: CaptureName, original: Original) -> Captured:
    """Export the flat form of a model; see `export`. `fresh` makes it in its initial state."""
    spec = original.subject.spec
    if original.point is not None:
        spec = spec.at(original.point)
    exporter = _Exporter(fresh, name, original, spec)
    examples = _examples(original)
    exported, unchecked = exporter.checked(examples, {})
    layouts = _other_layouts(exported, original)
    if layouts:  # the other program is the one that serves
        example = exported.example
        exported, unchecked = exporter.checked([example], layouts)
    return Captured(
        name=name,
        program=exported.program,
        convention="flat",
        mutates=changed_state(exported.program),
        warnings=(*lines_of(exporter.caught), *unchecked),
        guards=guards_of(exported.program, spec),
        owned=exported.owned,
        inputs=spec.tensors,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exported:
    """A program, the set that it was exported with, and the copied weights that only the program
    refers to.

    Its other tensors are the user's: torch.export takes tensors of Python modules, classes and
    closures without copying, and a model's own __deepcopy__ may share weights.
    """

    program: torch.export.ExportedProgram
    example: InputSet
    owned: tuple[Tensor, ...]


Layouts = Mapping[int, torch.memory_format]
"""Memory formats of outputs, by index."""


class _Exporter:
    """Calls torch.export.

    Attributes:
        caught: warnings so far.
    """

    def __init__(
        self,
        fresh: Callable[[], FlatModule],
        name: CaptureName,
        original: Original,
        spec: InputSpec,
    ) -> None:
        self._fresh = fresh
        self._name = name
        self._original = original
        self._spec = spec
        self._dynamic = {dim.name: _symbol(dim) for dim in spec.dims if dim.min < dim.max}
        self.caught: list[warnings.WarningMessage] = []

    def checked(
        self, examples: Sequence[InputSet], layouts: Layouts
    ) -> tuple[_Exported, tuple[str, ...]]:
        """The program of the first example that torch.export takes, and warnings of its check."""
        exported = self._first(examples, layouts)
        program = exported.program
        if self._dynamic:
            check_guards(program, self._spec)
        module = program.module()
        unchecked = check_answers("the exported program", module, self._original, flat=True)
        return exported, unchecked

    def _first(self, examples: Sequence[InputSet], layouts: Layouts) -> _Exported:
        """Export with the first example; with another only if a size came out as a constant."""
        for example in examples:
            try:
                return self._export(example, layouts)
            except Exception as error:
                message = str(error)
                is_last = example is examples[-1]
                if is_last or FIXED not in message:
                    raise refusal(error, self._spec) from error
        raise AssertionError("no example")

    def _export(self, example: InputSet, layouts: Layouts) -> _Exported:
        specs = self._spec.tensors
        shapes = tuple(map(self._dynamic_axes, specs))
        inputs = tuple(example.cloned().values())
        original_tensors = program_tensors(self._original.subject.model)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = self._fresh()
            module.layouts = layouts
            copied_tensors = program_tensors(module)
            copies = addresses_of(copied_tensors) - addresses_of(original_tensors)
            program = torch.export.export(
                module,
                inputs,
                dynamic_shapes={"tensors": shapes} if self._dynamic else None,
                strict=self._name == "export-strict",
            )
        self.caught.extend(caught)
        owned = tuple(each for each in program_tensors(program) if address_of(each) in copies)
        return _Exported(program=program, example=example, owned=owned)

    def _dynamic_axes(self, tensor: TensorSpec) -> dict[int, object] | None:
        """The symbols of a tensor's axes that vary; None if none does."""
        sizes = enumerate(tensor.shape)
        symbols = {axis: self._dynamic[size] for axis, size in sizes if size in self._dynamic}
        return symbols or None


def strict_may_help(error: CaptureError) -> bool:
    """Whether tracing the bytecode may succeed after an error of torch.export.

    It treats types, NumPy and numbers read from tensors differently, but not branches on values or
    fixed sizes.
    """
    if error.code == DIFFERS:
        return True
    if error.__cause__ is None:
        return False
    message = str(error.__cause__)
    return not _COMPARED.search(message)


def _symbol(dim: Dim) -> object:
    """A dim as torch.export declares it."""
    step = dim.multiple_of
    if step == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    return step * torch.export.Dim(f"_{dim.name}", min=dim.min // step, max=dim.max // step)


def _examples(original: Original) -> list[InputSet]:
    """The sets to export with: first one with small sizes above the minimum, since torch.export
    specializes on sizes 0 and 1; then the largest, since a size computed from a small one may be 1.
    """
    subject = original.subject
    if original.point is not None:
        return [subject.set_at(original.point)]

    def order(point: Mapping[str, int]) -> tuple[int, int]:
        small = [dim for dim in subject.spec.dims if point[dim.name] < 2 * dim.multiple_of]
        return len(small), total_size(point)

    points = list(subject.spec.points())
    small = min(points, key=order)
    large = max(points, key=total_size)
    points = [small] if large == small else [small, large]
    return [subject.set_at(point) for point in points]


def _other_layouts(exported: _Exported, original: Original) -> Layouts:
    """By index, eager's memory formats of outputs that the program lays out differently, such as
    nn.MultiheadAttention's without its fast path. Outputs without such a format are omitted.
    """
    eager = original.eager
    answers = zip(original.subject.sets, eager.first, strict=True)
    example = exported.example
    expected = next(answer for input_set, answer in answers if input_set is example)
    module: nn.Module = exported.program.module()
    if eager.stateful or not eager.deterministic:
        module = copy_of(module)
    inputs = example.cloned().values()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        got = module(*inputs)
    layouts: dict[int, torch.memory_format] = {}
    for index, output in enumerate(got):
        right = expected[index]
        layout = _layout_of(right)
        if layout is None or output.shape != right.shape:
            continue
        if not output.is_contiguous(memory_format=layout):
            layouts[index] = layout
    return layouts


def _layout_of(tensor: Tensor) -> torch.memory_format | None:
    for layout in _LAYOUTS:
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return None


def changed_state(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of the buffers and parameters that a call changes.

    The signature names no changed buffer until the graph is functionalized, which takes seconds for
    a large model, so only graphs with operations in place are.

    Raises:
        CaptureError: torch.export cannot tell, for example because two buffers overlap in memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    names = set(signature.buffers_to_mutate.values())
    names.update(parameters.values())
    return tuple(sorted(names))


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation may change its arguments; higher-order operations are assumed to."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return False
    if node.target in _NORMS:
        return bool(node.args[5])  # training
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable
