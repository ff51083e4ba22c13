"""The guards of an ExportedProgram in terms of the entry's dims, and whether it takes all declared sizes.

torch.export raises if a declared range does not fit. But some guards narrow a range silently (a size that a reshape halves must not
be 2), and a lowering that checks no guards would return wrong numbers for such sizes.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from types import CodeType
from typing import Any

import torch

from freezer.errors import first_line
from freezer.freezing.diagnostics.source_lines import line_of_stack
from freezer.spec.inputs import Dim, InputSpec

NUM_SIZES = 4096
"""The most combinations of sizes to try; beyond that, only each dim's sizes at the corners of the others."""

NUM_GUARDS = 8
"""The most guards to report."""

_ARITHMETIC = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Load),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
_SIZE = re.compile(r"L\['\w+'\]\[(\d+)\]\.size\(\)\[(\d+)\]|\btensors_(\d+)\.size\(\)\[(\d+)\]")


def guards_of(program: torch.export.ExportedProgram, spec: InputSpec) -> tuple[str, ...]:
    """Conditions on inputs, in words: bounds and multiples of dims, axes that share a dim, guards, and run-time assertions."""
    found: list[str] = []
    for dim in spec.dims:
        if dim.min < dim.max:
            step = f", in multiples of {dim.multiple_of}" if dim.multiple_of > 1 else ""
            found.append(f"{dim.min} <= {dim.name} <= {dim.max}{step}")
    for dim in spec.dims:
        axes = [f"{item.name}.shape[{axis}]" for item in spec.tensors for axis, size in enumerate(item.shape) if size == dim.name]
        if len(axes) > 1:
            found.append(f"{dim.name} == {' == '.join(axes)}")
    conditions = list(dict.fromkeys(_conditions(program, spec)))
    found += conditions[:NUM_GUARDS]
    if len(conditions) > NUM_GUARDS:
        found.append(f"{len(conditions) - NUM_GUARDS} more, which all declared sizes satisfy too")
    return (*found, *dict.fromkeys(_assertions(program)))


def unserved(program: torch.export.ExportedProgram, spec: InputSpec) -> str | None:
    """Describe declared sizes that a program does not take, and how to declare those that it takes; None if it takes all."""
    check = _checker(program, spec)
    refused = {tuple(point.values()): why for point in _some_points(spec) if (why := check(point)) is not None}
    if not refused:
        return None
    taken = [point for point in _some_points(spec) if tuple(point.values()) not in refused]
    for index, dim in enumerate(spec.dims):
        good = sorted({point[dim.name] for point in taken})
        bad = sorted({sizes[index] for sizes in refused} - set(good))
        if bad:
            guard = next(why for sizes, why in refused.items() if sizes[index] == bad[0])
            remedy = narrowed(dim, good)
            return f"the program does not take {dim.name}={bad[0]} ({guard}), got {dim}" + (f"; {remedy}" if remedy else "")
    sizes, guard = next(iter(refused.items()))
    point = ", ".join(f"{dim.name}={size}" for dim, size in zip(spec.dims, sizes, strict=True))
    return f"the program does not take {point} ({guard}), which the declared dims allow; declare fewer sizes, or one name for both"


def declare(name: str, low: int, high: int, multiple_of: int = 1) -> str:
    """The bounds of a dim as a catalog declares them."""
    step = f", multiple_of: {multiple_of}" if multiple_of > 1 else ""
    return f"`dims: {{{name}: {{min: {low}, max: {high}{step}}}}}`"


def narrowed(dim: Dim, sizes: Sequence[int]) -> str | None:
    """How to declare the accepted sizes of a dim; None if bounds and multiples cannot express them."""
    if not sizes or list(sizes) == list(dim.sizes):
        return None
    step = reduce(math.gcd, sizes, 0)
    fitting = [size for size in dim.sizes if sizes[0] <= size <= sizes[-1] and size % step == 0]
    if fitting != list(sizes):  # there is a hole: declare the sizes above it
        after = [size for size in sizes if all(other in sizes for other in dim.sizes if other >= size)]
        return f"declare {declare(dim.name, after[0], after[-1], dim.multiple_of)}" if after else None
    within = [size for size in dim.sizes if sizes[0] <= size <= sizes[-1]]
    return f"declare {declare(dim.name, sizes[0], sizes[-1], dim.multiple_of if within == fitting else step)}"


def sizes_of(conditions: Sequence[str], dim: Dim) -> list[int]:
    """The declared sizes of a dim that satisfy the conditions on it alone; conditions are as `named` gives them."""
    checks = [compiled for condition in conditions if (compiled := _compiled(condition, dim.name)) is not None]
    try:
        return [size for size in dim.sizes if all(eval(check, {"__builtins__": {}}, {dim.name: size}) for check in checks)]
    except ArithmeticError:
        return []


def _compiled(condition: str, name: str) -> CodeType | None:
    """Compile a condition that is arithmetic on one dim; None for any other."""
    try:
        tree = ast.parse(condition, mode="eval")
    except SyntaxError:
        return None
    plain = all(isinstance(node, _ARITHMETIC) and (not isinstance(node, ast.Name) or node.id == name) for node in ast.walk(tree))
    return compile(tree, "<condition>", "eval") if plain else None


def _conditions(program: torch.export.ExportedProgram, spec: InputSpec) -> Iterator[str]:
    """The program's guards on sizes, with the names of dims."""
    for guard in getattr(program, "_guards_code", None) or ():
        text = named(guard, spec)
        one, _, other = text.partition(" == ")
        if one != other and not one.isdigit():
            yield text


def named(guard: str, spec: InputSpec) -> str:
    """A condition of torch.export with the names of dims, or of inputs and axes."""

    def name(found: re.Match[str]) -> str:
        index, axis = (int(part) for part in found.groups() if part is not None)
        size = spec.tensors[index].shape[axis]
        return size if isinstance(size, str) else f"{spec.tensors[index].name}.shape[{axis}]"

    return _SIZE.sub(name, guard)


def _assertions(program: torch.export.ExportedProgram) -> Iterator[str]:
    """The program's run-time assertions on values, with the user's line."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            message = str(node.args[1]).removeprefix("Runtime assertion failed for expression ").partition(" on node")[0]
            where = line_of_stack(node.meta.get("stack_trace") or "")
            yield f"at run time: {message}" + (f" at {where}" if where else "")


def _checker(program: torch.export.ExportedProgram, spec: InputSpec) -> Callable[[Mapping[str, int]], str | None]:
    """A function that says why the program does not take a point; None if it does."""
    guards = getattr(program.module(), "_guards_fn", None)
    ranges = _ranges(program, spec)

    def check(point: Mapping[str, int]) -> str | None:
        for name, (low, high) in ranges.items():
            if not low <= point[name] <= high:
                return f"{name} must be from {low} to {high}"
        if guards is not None:
            try:
                guards(*(torch.empty(item.at(point), dtype=getattr(torch, item.dtype), device="meta") for item in spec.tensors))
            except (AssertionError, RuntimeError) as error:
                return named(first_line(error), spec)
        return None

    return check


def _ranges(program: torch.export.ExportedProgram, spec: InputSpec) -> dict[str, tuple[int, int]]:
    """The smallest and largest size of each dim, from the ranges of the symbols in the graph's input shapes."""
    found: dict[str, tuple[int, int]] = {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for item, name in zip(spec.tensors, program.graph_signature.user_inputs, strict=False):
        shape = getattr(values.get(str(name)), "shape", ())
        for size, symbol in zip(item.shape, shape, strict=False):
            if isinstance(size, str):
                low, high = _range(symbol, program.range_constraints)
                before = found.get(size, (low, high))
                found[size] = (max(low, before[0]), min(high, before[1]))
    return found


def _range(symbol: Any, constraints: Mapping[Any, Any]) -> tuple[int, int]:
    """The bounds of a size: an int, or a multiple of a symbol; any size for other expressions."""
    if isinstance(symbol, int):
        return symbol, symbol
    expression = getattr(getattr(symbol, "node", None), "expr", None)
    if expression is None:
        return 0, 2**63
    step, free = expression.as_coeff_Mul()
    bounds = constraints.get(free)
    if bounds is None or not step.is_Integer:
        return 0, 2**63
    return int(bounds.lower) * int(step), int(bounds.upper) * int(step) if bounds.upper.is_Integer else 2**63


def _some_points(spec: InputSpec) -> Iterator[dict[str, int]]:
    """All declared points if they are few; otherwise the spec's own, and each dim's sizes at its corners."""
    if math.prod(len(dim.sizes) for dim in spec.dims) <= NUM_SIZES:
        for sizes in product(*(dim.sizes for dim in spec.dims)):
            yield dict(zip((dim.name for dim in spec.dims), sizes, strict=True))
        return
    corners = list(spec.points())
    yield from corners
    for dim in spec.dims:
        skip = max(1, len(dim.sizes) // (NUM_SIZES // (len(spec.dims) * len(corners)) or 1))
        for corner in corners:
            yield from ({**corner, dim.name: size} for size in dim.sizes[::skip])
