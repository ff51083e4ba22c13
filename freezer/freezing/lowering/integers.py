"""Integers that engines compute otherwise than torch: OpenVINO has 32 bits for what torch computes
in 64, and both engines answer, or end the process, where a division of integers raises in torch.

The values of a program are bounded by interval arithmetic, from the bounds of its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._sympy.value_ranges import bound_sympy

from freezer.errors import BuildError
from freezer.freezing.capture import Captured
from freezer.runtime.input_sets import is_mask
from freezer.spec import TensorSpec

Interval = tuple[float, float]
"""Least and greatest value."""

_INT32 = torch.iinfo(torch.int32)
_OF_INT32: Interval = (_INT32.min, _INT32.max)
_ANY: Interval = (-math.inf, math.inf)

_DIVISIONS = ("floor_divide", "remainder", "fmod", "div", "floor_divide_", "__floordiv__")

_BOUNDED: Mapping[str, Interval] = {
    "sigmoid": (0, 1),
    "softmax": (0, 1),
    "_softmax": (0, 1),
    "tanh": (-1, 1),
    "sin": (-1, 1),
    "cos": (-1, 1),
    "sign": (-1, 1),
    "sgn": (-1, 1),
}
"""Operators whose results are bounded, however large their operands are."""

_PAIRS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
}

_SUMS = ("sum", "cumsum", "mm", "matmul", "bmm", "linear", "dot")


def check_integers(captured: Captured, engine: str, *, in_64_bits: bool) -> None:
    """Check that an engine computes the integers of a program as torch does.

    Args:
        captured: an exported program with its inputs.
        engine: name for the message.
        in_64_bits: whether the engine computes int64 in 64 bits.

    Raises:
        BuildError: a value may leave 32 bits, or a divisor may be 0 or -1.
    """
    bounds = _Bounds(captured)
    for node in captured.program.graph.nodes:
        if node.op != "call_function":
            continue
        problem = bounds.division(node)
        interval = bounds.add(node)
        if not in_64_bits and interval and _is_integer(node) and not _within(interval):
            problem = "a value may leave the 32 bits that it computes in"
        if problem:
            raise BuildError(
                f"{engine}: {problem} ({_name(node)}{_line(node)}); use inductor-frozen, bound the"
                " values (clamp), or compute them outside the model"
            )


class _Bounds:
    """Intervals of a program's values; None for values that depend on no input, and for those of
    unknown operators.
    """

    def __init__(self, captured: Captured) -> None:
        program = captured.program
        self._constraints = program.range_constraints
        self._of: dict[Node, Interval | None] = {}
        user_inputs = dict(zip(program.graph_signature.user_inputs, captured.inputs, strict=True))
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in user_inputs:
                self._of[node] = _of_input(user_inputs[node.name])

    def division(self, node: Node) -> str | None:
        """Why a division of integers may fail; None if it may not."""
        if _name(node) not in _DIVISIONS or not _is_integer(node):
            return None
        divisor = node.args[1]
        if isinstance(divisor, Node):
            interval = self._of.get(divisor)
            safe = interval is None or interval[0] > 0 or interval[1] < -1
        else:
            safe = not isinstance(divisor, int) or divisor not in (0, -1)
        return None if safe else "an integer may be divided by 0 or -1"

    def add(self, node: Node) -> Interval | None:
        """The interval of a node, from those of its operands."""
        name = _name(node)
        operands = [self._of[each] for each in node.all_input_nodes if self._of.get(each)]
        known = [interval for interval in operands if interval is not None]
        self._of[node] = self._result(node, name, known) if known else None
        return self._of[node]

    def _result(self, node: Node, name: str, operands: list[Interval]) -> Interval | None:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.bool:
            return (0, 1)
        if name in _BOUNDED:
            return _BOUNDED[name]
        if name.startswith(("arg", "topk", "sort", "nonzero", "size", "sym_size", "searchsorted")):
            return None
        if name in ("clamp", "clip", "hardtanh"):
            low, high = (*node.args[1:], None, None)[:2]
            least = low if isinstance(low, int | float) else -math.inf
            most = high if isinstance(high, int | float) else math.inf
            hull = _hull(operands)
            return (max(least, hull[0]), min(most, hull[1]))
        if name in _PAIRS:
            sides = [self._side(argument) for argument in node.args[:2]]
            ends = [_PAIRS[name](a, b) for a, b in product(*sides)]
            ends = [0.0 if math.isnan(end) else end for end in ends]
            return (min(ends), max(ends))
        if name in _SUMS:
            low, high = _hull(operands)
            num = self._num_summed(node)
            return (min(low * num, low), max(high * num, high))
        if name in ("neg", "abs"):
            low, high = _hull(operands)
            largest = max(abs(low), abs(high))
            return (-high, -low) if name == "neg" else (0, largest)
        if isinstance(value, Tensor) and value.is_floating_point() and not _kept(node):
            return _ANY
        return _hull(operands)

    def _side(self, argument: Any) -> Interval:
        if isinstance(argument, Node):
            interval = self._of.get(argument)
            return interval or _OF_INT32 if _is_integer(argument) else interval or _ANY
        return (argument, argument) if isinstance(argument, int | float) else _OF_INT32

    def _num_summed(self, node: Node) -> int:
        """At most how many elements an element of the result is the sum of."""
        operand = node.args[0]
        shape = operand.meta["val"].shape if isinstance(operand, Node) else ()
        num = 1
        for size in shape:
            num *= max(self._largest(size), 1)
        return num

    def _largest(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        upper = bound_sympy(size.node.expr, self._constraints).upper
        return int(upper) if upper.is_finite else _INT32.max


def _of_input(item: TensorSpec) -> Interval:
    """The values that a call may give: the loaders check indices and 32 bits."""
    if item.indices is not None:
        return item.indices
    if item.dtype == "bool" or is_mask(item):
        return (0, 1)
    if item.dtype in ("uint8", "int8", "int16"):
        limits = torch.iinfo(getattr(torch, item.dtype))
        return (limits.min, limits.max)
    return _OF_INT32 if item.dtype in ("int32", "int64") else _ANY


def _hull(intervals: list[Interval]) -> Interval:
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _within(interval: Interval) -> bool:
    return _INT32.min <= interval[0] and interval[1] <= _INT32.max


def _kept(node: Node) -> bool:
    """Whether a floating-point result has values of its operand only: a cast, copy or view."""
    name = _name(node)
    return name in ("to", "_to_copy", "type_as", "clone", "view", "round", "floor", "ceil", "trunc")


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(node.target) if schema is None else schema.name.rpartition("::")[2]


def _line(node: Node) -> str:
    """The line of the model's code that made a node; empty if it is unknown."""
    trace = str(node.meta.get("stack_trace", "")).strip().splitlines()
    return f" at `{trace[-1].strip()}`" if trace else ""
