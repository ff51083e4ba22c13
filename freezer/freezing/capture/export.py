"""Captures by torch.export, strict and not: programs for all sizes that the entry declares,
compared with the model.

torch.export treats a size of 1, and every type or attribute that Python inspects, as constant. So a
program is tried on every input set, and its guards on every declared size, before anything is built
from it.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.equivalence import EagerAnswers, ProgramCall, check_answers, flat_call
from freezer.freezing.capture.mutation import changed_state
from freezer.freezing.capture.program import Captured, FlatModule, lines_of
from freezer.freezing.diagnostics.messages import code_of, export_sentence
from freezer.freezing.diagnostics.source_lines import line_of_stack
from freezer.freezing.models import Subject
from freezer.freezing.recipes import CaptureName
from freezer.runtime.input_sets import InputSet
from freezer.runtime.tensors import address_of, addresses_of, program_tensors
from freezer.spec import Dim, InputSpec

NUM_SIZES = 4096
"""The most combinations of sizes to try; beyond that, only each dim's sizes with the largest of the
others.
"""

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_SIZE = re.compile(
    r"L\['\w+'\]\[(\d+)\]\.size\(\)\[(\d+)\]|\btensors_(\d+)(?:_\d+)?\.size\(\)\[(\d+)\]"
)

_DIFFERS = "CP-EXPORT-DIFFERS"
DIMS = "CP-EXPORT-DIMS"
_COMPARED = re.compile(r"Could not guard on data-dependent expression (\w+ [<>=!]|Eq\(|Ne\()")
_VIOLATED = re.compile(r"^Constraints violated \((?P<names>[^)]*)\)")
_FIXED = "specialized it to be a constant"
_MAX_CONDITIONS = 2
_BOUND = re.compile(r"^(?P<name>\w+) = Dim\('\w+'(?:, min=(?P<min>\d+))?(?:, max=(?P<max>\d+))?\)$")
_MULTIPLE = re.compile(r"^(?P<name>\w+) = (?P<step>\d+)\*\w+$")
_OTHER = re.compile(r"^(?P<name>\w+) = (?P<other>\w+)$")


def export(
    subject: Subject,
    point: Mapping[str, int] | None,
    eager: Callable[[], EagerAnswers],
    *,
    strict: bool = False,
) -> Captured:
    """Export a model that is not TorchScript.

    Raises:
        CaptureError: torch.export does not take the model, or takes fewer sizes than declared (code
            CP-EXPORT-DIMS), or the program differs from the model (code CP-EXPORT-DIFFERS).
    """

    def fresh() -> FlatModule:
        return FlatModule(subject.fresh(), subject.spec).eval()

    try:
        return export_flat(fresh, "export-strict" if strict else "export", subject, point, eager)
    except CaptureError as error:
        parts = (
            name
            for name, part in subject.model.named_modules()
            if isinstance(part, torch.jit.ScriptModule)
        )
        if error.code not in (DIMS, _DIFFERS) and (scripted := next(parts, None)):
            why = (
                f"torch.export: the model holds TorchScript ({scripted}), which torch.export does"
                " not look into"
            )
            raise CaptureError(why) from error.__cause__
        raise


def export_flat(
    fresh: Callable[[], FlatModule],
    name: CaptureName,
    subject: Subject,
    point: Mapping[str, int] | None,
    eager: Callable[[], EagerAnswers],
) -> Captured:
    """Export the flat form of a model; see `export`. `fresh` makes it in its initial state."""
    spec = subject.spec if point is None else subject.spec.at(point)
    exporter = _Exporter(fresh, name, subject, spec)

    def checked(
        examples: Sequence[InputSet], layouts: Mapping[int, torch.memory_format]
    ) -> tuple[_Exported, tuple[str, ...]]:
        found = exporter.first(examples, layouts)
        if exporter.dynamic and (missing := unserved(found.program, spec)):
            raise CaptureError(f"torch.export: {missing}", code=DIMS)
        return found, _check_answers(found.program, subject, eager(), found.example)

    found, unchecked = checked(_examples(subject, point), {})
    if layouts := _other_layouts(found.program, subject, eager(), found.example):
        found, unchecked = checked(
            [found.example], layouts
        )  # check the other program too: it is the one that serves
    outputs = ", ".join(f"output {subject.outputs[place].name!r}" for place in layouts)
    return Captured(
        name=name,
        program=found.program,
        convention="flat",
        mutates=changed_state(found.program),
        warnings=(*lines_of(exporter.caught), *unchecked),
        guards=guards_of(found.program, spec),
        notes=(f"The program gives {outputs} eager's layout.",) if layouts else (),
        owned=found.owned,
    )


@dataclass(frozen=True, kw_only=True)
class _Exported:
    """A program, the set that it was exported with, and the copied weights that only the program
    refers to.

    Its other tensors are the user's: torch.export takes tensors of Python modules, classes and
    closures without copying, and a model's own __deepcopy__ may share weights.
    """

    program: torch.export.ExportedProgram
    example: InputSet
    owned: tuple[Tensor, ...]


class _Exporter:
    """Calls torch.export.

    Attributes:
        dynamic: torch's dims by name, of those that vary.
        caught: warnings so far.
    """

    def __init__(
        self, fresh: Callable[[], FlatModule], name: CaptureName, subject: Subject, spec: InputSpec
    ) -> None:
        self._fresh, self._name, self._subject, self._spec = fresh, name, subject, spec
        self.dynamic = {dim.name: _symbol(dim) for dim in spec.dims if dim.min < dim.max}
        self.caught: list[warnings.WarningMessage] = []

    def first(
        self, examples: Sequence[InputSet], layouts: Mapping[int, torch.memory_format]
    ) -> _Exported:
        """The program of the first example that torch.export takes; tries another only if a size
        came out as a constant.
        """
        for example in examples:
            try:
                return self._export(example, layouts)
            except Exception as error:
                if example is examples[-1] or _FIXED not in str(error):
                    raise _refusal(error, self._spec) from error
        raise AssertionError("there is an example")

    def _export(self, example: InputSet, layouts: Mapping[int, torch.memory_format]) -> _Exported:
        shapes = tuple(
            {
                axis: self.dynamic[size]
                for axis, size in enumerate(item.shape)
                if isinstance(size, str) and size in self.dynamic
            }
            or None
            for item in self._spec.tensors
        )
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = self._fresh()
            module.layouts = layouts
            copies = addresses_of(program_tensors(module)) - addresses_of(
                program_tensors(self._subject.model)
            )
            program = torch.export.export(
                module,
                tuple(example.cloned().values()),
                dynamic_shapes={"tensors": shapes} if self.dynamic else None,
                strict=self._name == "export-strict",
            )
        self.caught.extend(caught)
        owned = tuple(tensor for tensor in program_tensors(program) if address_of(tensor) in copies)
        return _Exported(program=program, example=example, owned=owned)


def strict_may_help(error: Exception) -> bool:
    """Whether tracing the bytecode may succeed after an error of torch.export.

    It treats types, NumPy and numbers read from tensors differently, but not branches on values or
    fixed sizes.
    """
    cause = error.__cause__
    if getattr(error, "code", "") == _DIFFERS:
        return True
    return (
        cause is not None
        and not _COMPARED.search(str(cause))
        and not str(cause).startswith("Constraints violated")
    )


def _symbol(dim: Dim) -> Any:
    """A dim as torch.export declares it."""
    if dim.multiple_of == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    step = dim.multiple_of
    return step * torch.export.Dim(f"_{dim.name}", min=dim.min // step, max=dim.max // step)


def _examples(subject: Subject, point: Mapping[str, int] | None) -> list[InputSet]:
    """The sets to export with: first one with small sizes above the minimum, since torch.export
    specializes on sizes 0 and 1; then the largest, since a size computed from a small one may be 1.
    """
    if point is not None:
        return [subject.set_at(point)]
    steps = {dim.name: dim.multiple_of for dim in subject.spec.dims}
    points = list(subject.spec.points())
    small = min(
        points,
        key=lambda one: (
            sum(size < 2 * steps[name] for name, size in one.items()),
            sum(one.values()),
        ),
    )
    large = max(points, key=lambda one: sum(one.values()))
    return [subject.set_at(one) for one in ([small, large] if large != small else [small])]


def _refusal(error: Exception, spec: InputSpec) -> CaptureError:
    """The error for an exception of torch.export; if sizes are the reason, it names them and how to
    declare them.
    """
    text = str(error)
    if not (found := _VIOLATED.match(text)):
        return CaptureError(f"torch.export: {export_sentence(error)}", code=code_of(error))
    names = [
        name
        for dim in spec.dims
        if (name := dim.name) in re.findall(r"[A-Za-z]\w*", found["names"].replace("*_", " "))
    ]
    conditions = list(
        dict.fromkeys(
            _condition(line, spec) for line in re.findall(r"^  - (.*)$", text, re.MULTILINE)
        )
    )
    fixes = text.partition("Suggested fixes:\n")[2].partition("\n\n")[0].splitlines()
    remedies = [remedy for line in fixes if (remedy := _remedy(line.strip(), spec, names))]
    return CaptureError(
        f"torch.export: no program takes all declared sizes of {' and '.join(names)}: it needs "
        f"{' and '.join(conditions[:_MAX_CONDITIONS])}; "
        f"{' and '.join(remedies) or 'declare other bounds, or remove the condition on sizes from forward'}",
        code=DIMS,
    )


def _condition(line: str, spec: InputSpec) -> str:
    """A condition on sizes from a message of torch.export, with the names of dims."""
    if found := re.search(rf"{_FIXED} \((\d+)\)", line):
        name = re.search(r"You marked (\S+) as dynamic", line)
        return f"{name[1] if name else 'a size'} == {found[1]}"
    if found := re.search(r"The values of (\w+) = .* and (\w+) = .* must always be equal", line):
        return f"{found[1]} == {found[2]}"
    guard = line.partition("satisfy the generated guard ")[2].rstrip(".") or line
    return named(guard, spec)


def _remedy(fix: str, spec: InputSpec, names: Sequence[str]) -> str | None:
    """A fix that torch.export suggests for one of some dims, in the words of a catalog; None if it
    is part of another fix.
    """
    dims = {dim.name: dim for dim in spec.dims if dim.name in names}
    if (found := _MULTIPLE.match(fix)) and found["name"] in dims:
        dim, step = dims[found["name"]], int(found["step"])
        low, high = -(-dim.min // step) * step, dim.max // step * step
        return f"declare {_declare(dim.name, low, high, step)}" if low <= high else None
    if (found := _BOUND.match(fix)) and found["name"] in dims:
        dim = dims[found["name"]]
        return (
            "declare"
            f" {_declare(dim.name, int(found['min'] or dim.min), int(found['max'] or dim.max), dim.multiple_of)}"
        )
    if (found := _OTHER.match(fix)) and found["name"] in dims:
        if found["other"].isdigit():
            return f"write {found['other']} for {found['name']} in the shapes"
        return f"name both {found['other']} in the shapes"
    return None


def _check_answers(
    program: torch.export.ExportedProgram, subject: Subject, eager: EagerAnswers, example: InputSet
) -> tuple[str, ...]:
    """Compare a program's answers with the model's; see `check_answers`.

    The program keeps its state.
    """
    module = program.module()

    def fresh() -> ProgramCall:
        with (
            warnings.catch_warnings()
        ):  # copying a graph copies its pytree specs, of which one class is deprecated
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            return flat_call(module if eager.second is None else copy.deepcopy(module))

    def why(item: InputSet) -> str:
        ones = [
            dim for dim in subject.spec.dims if item.point[dim.name] == 1 < example.point[dim.name]
        ]
        if not ones:
            return ""
        remedies = " and ".join(_declare(dim.name, 2, dim.max) for dim in ones)
        names = " and ".join(dim.name for dim in ones)
        return (
            f"; torch.export assumes {names} larger than 1: declare {remedies}, or do not read that"
            " size in forward"
        )

    return check_answers("the exported program", fresh, subject, eager, code=_DIFFERS, why=why)


def _other_layouts(
    program: torch.export.ExportedProgram, subject: Subject, eager: EagerAnswers, example: InputSet
) -> dict[int, torch.memory_format]:
    """By index, eager's memory formats of outputs that the program lays out differently, such as
    nn.MultiheadAttention's without its fast path. Outputs without such a format are omitted.
    """
    expected = next(
        answer for item, answer in zip(subject.sets, eager.first, strict=True) if item is example
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module = program.module()
        changes = eager.second is not None or not eager.deterministic
        got = (copy.deepcopy(module) if changes else module)(*example.cloned().values())
    found: dict[int, torch.memory_format] = {}
    for place, (one, other) in enumerate(zip(expected, got, strict=True)):
        layout = next(
            (layout for layout in _LAYOUTS if one.is_contiguous(memory_format=layout)), None
        )
        if (
            layout is not None
            and one.shape == other.shape
            and not other.is_contiguous(memory_format=layout)
        ):
            found[place] = layout
    return found


def guards_of(program: torch.export.ExportedProgram, spec: InputSpec) -> tuple[str, ...]:
    """Conditions on inputs, in words: bounds and multiples of dims, guards, and run-time
    assertions.
    """
    found = [str(dim) for dim in spec.dims if dim.min < dim.max]
    for guard in program._guards_code or ():
        text = named(guard, spec)
        one, _, other = text.partition(" == ")
        if one != other and not one.isdigit():
            found.append(text)
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            message = (
                str(node.args[1])
                .removeprefix("Runtime assertion failed for expression ")
                .partition(" on node")[0]
            )
            where = line_of_stack(node.meta.get("stack_trace") or "")
            found.append(f"at run time: {message}" + (f" at {where}" if where else ""))
    return tuple(dict.fromkeys(found))


def unserved(program: torch.export.ExportedProgram, spec: InputSpec) -> str | None:
    """Describe declared sizes that a program does not take, and how to declare those that it takes;
    None if it takes all.

    torch.export raises if a declared range does not fit. But some guards narrow a range silently (a
    size that a reshape halves must not be 2), and a lowering that checks no guards would return
    wrong numbers for such sizes.
    """
    guards: Any = program.module()._guards_fn
    refused: dict[tuple[int, ...], str] = {}
    taken: list[dict[str, int]] = []
    for point in _some_points(spec):
        try:
            guards(
                *(
                    torch.empty(item.at(point), dtype=getattr(torch, item.dtype), device="meta")
                    for item in spec.tensors
                )
            )
            taken.append(point)
        except (AssertionError, ArithmeticError, RuntimeError) as error:
            refused[tuple(point.values())] = named(
                first_line(error).removeprefix("Guard failed: "), spec
            )
    if not refused:
        return None
    for index, dim in enumerate(spec.dims):
        good = sorted({point[dim.name] for point in taken})
        bad = sorted({sizes[index] for sizes in refused} - set(good))
        if bad:
            guard = next(why for sizes, why in refused.items() if sizes[index] == bad[0])
            remedy = _narrowed(dim, good)
            return f"the program does not take {dim.name}={bad[0]} ({guard}), got {dim}" + (
                f"; {remedy}" if remedy else ""
            )
    sizes, guard = next(iter(refused.items()))
    named_sizes = ", ".join(
        f"{dim.name}={size}" for dim, size in zip(spec.dims, sizes, strict=True)
    )
    return (
        f"the program does not take {named_sizes} ({guard}); declare fewer sizes, or one name for"
        " both dims"
    )


def _declare(name: str, low: int, high: int, multiple_of: int = 1) -> str:
    """The bounds of a dim as a catalog declares them."""
    step = f", multiple_of: {multiple_of}" if multiple_of > 1 else ""
    return f"`dims: {{{name}: {{min: {low}, max: {high}{step}}}}}`"


def _narrowed(dim: Dim, sizes: Sequence[int]) -> str | None:
    """How to declare the accepted sizes of a dim; None if bounds and multiples cannot
    express them.
    """
    if not sizes or list(sizes) == list(dim.sizes):
        return None
    step = reduce(math.gcd, sizes, 0)
    fitting = [size for size in dim.sizes if sizes[0] <= size <= sizes[-1] and size % step == 0]
    if fitting != list(sizes):  # there is a hole: declare the sizes above it
        after = [
            size for size in sizes if all(other in sizes for other in dim.sizes if other >= size)
        ]
        return (
            f"declare {_declare(dim.name, after[0], after[-1], dim.multiple_of)}" if after else None
        )
    within = [size for size in dim.sizes if sizes[0] <= size <= sizes[-1]]
    return (
        "declare"
        f" {_declare(dim.name, sizes[0], sizes[-1], dim.multiple_of if within == fitting else step)}"
    )


def named(guard: str, spec: InputSpec) -> str:
    """A condition of torch.export with the names of dims, or of inputs and axes."""

    def name(found: re.Match[str]) -> str:
        index, axis = (int(part) for part in found.groups() if part is not None)
        size = spec.tensors[index].shape[axis]
        return size if isinstance(size, str) else f"{spec.tensors[index].name}.shape[{axis}]"

    return _SIZE.sub(name, guard)


def _some_points(spec: InputSpec) -> Iterator[dict[str, int]]:
    """All declared points if they are few; otherwise the spec's own, and each dim's sizes with the
    largest of the others.
    """
    if math.prod(len(dim.sizes) for dim in spec.dims) <= NUM_SIZES:
        for sizes in product(*(dim.sizes for dim in spec.dims)):
            yield dict(zip((dim.name for dim in spec.dims), sizes, strict=True))
        return
    yield from spec.points()
    largest = {dim.name: dim.max for dim in spec.dims}
    for dim in spec.dims:
        yield from (
            {**largest, dim.name: size} for size in dim.sizes[:: len(dim.sizes) // NUM_SIZES + 1]
        )
