"""Captures by torch.export, strict and not: programs for all sizes that the entry declares,
compared with the model.

torch.export treats a size of 1, and every type or attribute that Python inspects, as constant. So a
program is tried on every input set, and its guards on every declared size, before anything is built
from it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import (
    DIFFERS,
    Original,
    ProgramCall,
    check_answers,
    flat_call,
)
from freezer.freezing.capture.export_sizes import (
    DIMS,
    FIXED,
    declared,
    guards_of,
    refusal,
    unserved,
)
from freezer.freezing.capture.mutation import changed_state
from freezer.freezing.capture.program import Captured, FlatModule, lines_of, total_size
from freezer.freezing.recipes import CaptureName
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import address_of, addresses_of, program_tensors
from freezer.spec import Dim, InputSpec

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_COMPARED = re.compile(
    r"Could not guard on data-dependent expression (\w+ [<>=!]|Eq\(|Ne\()|^Constraints violated"
)
"""Branches on values, and fixed sizes, which strict tracing does not take either."""


def export(original: Original, *, strict: bool = False) -> Captured:
    """Export a model that is not TorchScript.

    Raises:
        CaptureError: torch.export does not take the model, or takes fewer sizes than declared (code
            CP-EXPORT-DIMS), or the program differs from the model (code CP-CAPTURE-DIFFERS).
    """
    subject = original.subject
    name: CaptureName = "export-strict" if strict else "export"
    try:
        return export_flat(lambda: FlatModule(subject.fresh(), subject.spec).eval(), name, original)
    except CaptureError as error:
        if error.code in (DIMS, DIFFERS):
            raise
        for path, part in subject.model.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise CaptureError(
                    f"torch.export: the model holds TorchScript ({path}), which torch.export does"
                    " not look into"
                ) from error.__cause__
        raise


def export_flat(fresh: Callable[[], FlatModule], name: CaptureName, original: Original) -> Captured:
    """Export the flat form of a model; see `export`. `fresh` makes it in its initial state."""
    subject, point = original.subject, original.point
    spec = subject.spec if point is None else subject.spec.at(point)
    exporter = _Exporter(fresh, name, original, spec)
    exported, unchecked = exporter.checked(_examples(original), {})
    layouts = _other_layouts(exported, original)
    if layouts:  # the other program is the one that serves
        exported, unchecked = exporter.checked([exported.example], layouts)
    outputs = ", ".join(f"output {subject.outputs[index].name!r}" for index in layouts)
    return Captured(
        name=name,
        program=exported.program,
        convention="flat",
        mutates=changed_state(exported.program),
        warnings=(*lines_of(exporter.caught), *unchecked),
        guards=guards_of(exported.program, spec),
        notes=(f"The program gives {outputs} eager's layout.",) if layouts else (),
        owned=exported.owned,
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
        self._fresh, self._name, self._original, self._spec = fresh, name, original, spec
        self._dynamic = {dim.name: _symbol(dim) for dim in spec.dims if dim.min < dim.max}
        self.caught: list[warnings.WarningMessage] = []

    def checked(
        self, examples: Sequence[InputSet], layouts: Layouts
    ) -> tuple[_Exported, tuple[str, ...]]:
        """The program of the first example that torch.export takes, and warnings of its check."""
        exported = self._first(examples, layouts)
        missing = unserved(exported.program, self._spec) if self._dynamic else None
        if missing:
            raise CaptureError(f"torch.export: {missing}", code=DIMS)
        return exported, _check_answers(exported, self._original)

    def _first(self, examples: Sequence[InputSet], layouts: Layouts) -> _Exported:
        """Export with the first example; with another only if a size came out as a constant."""
        *others, last = examples
        for example in others:
            try:
                return self._export(example, layouts)
            except Exception as error:
                if FIXED not in str(error):
                    raise refusal(error, self._spec) from error
        try:
            return self._export(last, layouts)
        except Exception as error:
            raise refusal(error, self._spec) from error

    def _export(self, example: InputSet, layouts: Layouts) -> _Exported:
        shapes = []
        for item in self._spec.tensors:
            symbols = {axis: self._dynamic.get(str(size)) for axis, size in enumerate(item.shape)}
            dims = {axis: symbol for axis, symbol in symbols.items() if symbol is not None}
            shapes.append(dims or None)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = self._fresh()
            module.layouts = layouts
            source = addresses_of(program_tensors(self._original.subject.model))
            copies = addresses_of(program_tensors(module)) - source
            program = torch.export.export(
                module,
                tuple(example.cloned().values()),
                dynamic_shapes={"tensors": tuple(shapes)} if self._dynamic else None,
                strict=self._name == "export-strict",
            )
        self.caught.extend(caught)
        owned = [tensor for tensor in program_tensors(program) if address_of(tensor) in copies]
        return _Exported(program=program, example=example, owned=tuple(owned))


def strict_may_help(error: CaptureError) -> bool:
    """Whether tracing the bytecode may succeed after an error of torch.export.

    It treats types, NumPy and numbers read from tensors differently, but not branches on values or
    fixed sizes.
    """
    cause = error.__cause__
    return error.code == DIFFERS or (cause is not None and not _COMPARED.search(str(cause)))


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
    steps = {dim.name: dim.multiple_of for dim in subject.spec.dims}

    def order(point: Mapping[str, int]) -> tuple[int, int]:
        num_small = sum(size < 2 * steps[name] for name, size in point.items())
        return num_small, total_size(point)

    points = list(subject.spec.points())
    small, large = min(points, key=order), max(points, key=total_size)
    return [subject.set_at(point) for point in ([small, large] if large != small else [small])]


def _check_answers(exported: _Exported, original: Original) -> tuple[str, ...]:
    """Compare a program's answers with the model's; see `check_answers`.

    The program keeps its state.
    """
    module = exported.program.module()

    def fresh() -> ProgramCall:
        return flat_call(module if original.eager.second is None else _copy_of(module))

    def why(input_set: InputSet) -> str:
        sizes, example = input_set.point, exported.example.point
        dims = original.subject.spec.dims
        ones = [dim for dim in dims if sizes[dim.name] == 1 < example[dim.name]]
        if not ones:
            return ""
        names = " and ".join(dim.name for dim in ones)
        remedies = " and ".join(declared(dim.name, 2, dim.max) for dim in ones)
        return (
            f"; torch.export assumes {names} larger than 1: declare {remedies}, or do not read that"
            " size in forward"
        )

    return check_answers("the exported program", fresh, original, why=why)


def _copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about classes that the copy uses
        return copy.deepcopy(module)


def _other_layouts(exported: _Exported, original: Original) -> dict[int, torch.memory_format]:
    """By index, eager's memory formats of outputs that the program lays out differently, such as
    nn.MultiheadAttention's without its fast path. Outputs without such a format are omitted.
    """
    answers = zip(original.subject.sets, original.eager.first, strict=True)
    expected = next(answer for input_set, answer in answers if input_set is exported.example)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module = exported.program.module()
        if original.eager.second is not None or not original.eager.deterministic:
            module = _copy_of(module)
        got = module(*exported.example.cloned().values())
    layouts: dict[int, torch.memory_format] = {}
    for index, (right, output) in enumerate(zip(expected, got, strict=True)):
        fitting = (one for one in _LAYOUTS if right.is_contiguous(memory_format=one))
        layout = next(fitting, None)
        if layout is None or right.shape != output.shape:
            continue
        if not output.is_contiguous(memory_format=layout):
            layouts[index] = layout
    return layouts
