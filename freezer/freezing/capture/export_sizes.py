"""The sizes that an exported program takes: refusals of torch.export and guards of programs, in the
words of a catalog.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch

from freezer.errors import CaptureError, first_line
from freezer.freezing.diagnostics import export_sentence, line_of_stack
from freezer.spec import Dim, InputSpec

NUM_SIZES = 4096
"""The most combinations of sizes to try; beyond that, only each dim's sizes with the largest of the
others.
"""

DIMS = "CP-EXPORT-DIMS"
"""Code of a program that takes fewer sizes than declared."""

FIXED = "specialized it to be a constant"
"""What torch.export says of a size that it treats as a constant."""

_SIZE = re.compile(
    r"L\['\w+'\]\[(\d+)\]\.size\(\)\[(\d+)\]|\btensors_(\d+)(?:_\d+)?\.size\(\)\[(\d+)\]"
)
_VIOLATED = re.compile(r"^Constraints violated \((?P<names>[^)]*)\)")
_MAX_CONDITIONS = 2
_FIX = re.compile(
    r"^(?P<name>\w+) = (?:(?P<step>\d+)\*\w+|(?P<other>\w+)"
    r"|Dim\('\w+'(?:, min=(?P<min>\d+))?(?:, max=(?P<max>\d+))?\))$"
)
"""A fix that torch.export suggests for a dim: multiples, another dim or a number, or bounds."""


def refusal(error: Exception, spec: InputSpec) -> CaptureError:
    """The error for an exception of torch.export; if sizes are the reason, it names them and how to
    declare them.
    """
    text = str(error)
    violated = _VIOLATED.match(text)
    if not violated:
        return CaptureError(f"torch.export: {export_sentence(error)}")
    mentioned = re.findall(r"[A-Za-z]\w*", violated["names"].replace("*_", " "))
    dims = {dim.name: dim for dim in spec.dims if dim.name in mentioned}
    lines = re.findall(r"^  - (.*)$", text, re.MULTILINE)
    conditions = list(dict.fromkeys(_condition(line, spec) for line in lines))
    fixes = text.partition("Suggested fixes:\n")[2].partition("\n\n")[0].splitlines()
    remedies = list(filter(None, (_remedy(fix.strip(), dims) for fix in fixes)))
    remedy = " and ".join(remedies)
    if not remedies:
        remedy = "declare other bounds, or remove the condition on sizes from forward"
    return CaptureError(
        f"torch.export: no program takes all declared sizes of {' and '.join(dims)}: it needs "
        f"{' and '.join(conditions[:_MAX_CONDITIONS])}; {remedy}",
        code=DIMS,
    )


def _condition(line: str, spec: InputSpec) -> str:
    """A condition on sizes from a message of torch.export, with the names of dims."""
    fixed = re.search(rf"You marked (\S+) as dynamic.*{FIXED} \((\d+)\)", line)
    equal = re.search(r"The values of (\w+) = .* and (\w+) = .* must always be equal", line)
    if fixed or equal:
        return " == ".join((fixed or equal).groups())  # type: ignore[union-attr]
    guard = line.partition("satisfy the generated guard ")[2].rstrip(".")
    return with_names(guard or line, spec)


def _remedy(fix: str, dims: Mapping[str, Dim]) -> str | None:
    """A fix that torch.export suggests for one of some dims, in the words of a catalog; None if it
    is part of another fix.
    """
    found = _FIX.match(fix)
    dim = dims.get(found["name"]) if found else None
    if found is None or dim is None:
        return None
    if found["other"]:
        if found["other"].isdigit():
            return f"write {found['other']} for {dim.name} in the shapes"
        return f"name both {found['other']} in the shapes"
    low, high, step = int(found["min"] or dim.min), int(found["max"] or dim.max), dim.multiple_of
    if found["step"]:
        step = int(found["step"])
        low, high = math.ceil(dim.min / step) * step, dim.max // step * step
    return f"declare {declared(dim.name, low, high, step)}" if low <= high else None


def declared(name: str, low: int, high: int, multiple_of: int = 1) -> str:
    """The bounds of a dim as a catalog declares them."""
    step = f", multiple_of: {multiple_of}" if multiple_of > 1 else ""
    return f"`dims: {{{name}: {{min: {low}, max: {high}{step}}}}}`"


def guards_of(program: torch.export.ExportedProgram, spec: InputSpec) -> tuple[str, ...]:
    """Conditions on inputs, in words: bounds and multiples of dims, guards, and run-time
    assertions.
    """
    texts = [str(dim) for dim in spec.dims if dim.min < dim.max]
    for guard in program._guards_code or ():
        text = with_names(guard, spec)
        size, _, expected = text.partition(" == ")
        if size != expected and not size.isdigit():
            texts.append(text)
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            message = str(node.args[1]).removeprefix("Runtime assertion failed for expression ")
            line = line_of_stack(node.meta.get("stack_trace"))
            at = f" at {line}" if line else ""
            texts.append(f"at run time: {message.partition(' on node')[0]}{at}")
    return tuple(dict.fromkeys(texts))


def unserved(program: torch.export.ExportedProgram, spec: InputSpec) -> str | None:
    """Describe declared sizes that a program does not take, and how to declare those that it takes;
    None if it takes all.

    torch.export raises if a declared range does not fit. But some guards narrow a range silently (a
    size that a reshape halves must not be 2), and a lowering that checks no guards would return
    wrong numbers for such sizes.
    """
    refused: list[tuple[dict[str, int], str]] = []
    taken: list[dict[str, int]] = []
    guards = program.module()._guards_fn
    dtypes = [getattr(torch, item.dtype) for item in spec.tensors]
    for point in _some_points(spec):
        shapes = [item.at(point) for item in spec.tensors]
        inputs = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        try:
            guards(*inputs)  # type: ignore[operator]  # a module
            taken.append(point)
        except (AssertionError, ArithmeticError, RuntimeError) as error:
            guard = first_line(error).removeprefix("Guard failed: ")
            refused.append((point, with_names(guard, spec)))
    for dim in spec.dims:
        good = {point[dim.name] for point in taken}
        for point, guard in refused:
            if point[dim.name] not in good:
                size = point[dim.name]
                remedy = _narrowed(dim, good)
                return f"the program does not take {dim.name}={size} ({guard}), got {dim}{remedy}"
    if not refused:
        return None
    point, guard = refused[0]
    sizes = ", ".join(f"{name}={size}" for name, size in point.items())
    return (
        f"the program does not take {sizes} ({guard}); declare fewer sizes, or one name for both"
        " dims"
    )


def _narrowed(dim: Dim, good: set[int]) -> str:
    """How to declare the largest accepted sizes of a dim; empty if the largest is refused."""
    sizes = list(dim.sizes)
    low = None
    while sizes and sizes[-1] in good:
        low = sizes.pop()
    return "" if low is None else f"; declare {declared(dim.name, low, dim.max, dim.multiple_of)}"


def with_names(guard: str, spec: InputSpec) -> str:
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
    names: Sequence[str] = [dim.name for dim in spec.dims]
    if math.prod(len(dim.sizes) for dim in spec.dims) <= NUM_SIZES:
        for sizes in product(*(dim.sizes for dim in spec.dims)):
            yield dict(zip(names, sizes, strict=True))
        return
    yield from spec.points()
    largest = {dim.name: dim.max for dim in spec.dims}
    for dim in spec.dims:
        for size in dim.sizes[:: len(dim.sizes) // NUM_SIZES + 1]:
            yield {**largest, dim.name: size}
