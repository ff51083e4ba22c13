"""The inputs that an ExportedProgram tells of: from its example inputs, its signature and its range constraints."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.errors import SourceError
from freezer.samples import tensor_spec
from freezer.spec import InputSpec, declared_spec

UNBOUNDED_MAX = 8
"""The largest size of a dim that the program leaves open upwards, unless its example is larger."""


def spec_of(program: torch.export.ExportedProgram) -> InputSpec | None:
    """The inputs of a program; None where it was saved without example inputs.

    A dim is named `batch` where it is the first axis of an input, else by its place (`dim_1`). Integers get the example's range.

    Raises:
        SourceError: an input is of a type that no catalog declares.
    """
    if program.example_inputs is None:
        return None
    args, kwargs = program.example_inputs
    names = list(inspect.signature(program.module().forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = _Dims(program, _placeholder_shapes(program))
    return declared_spec({name: dims.item(value, name) for name, value in given.items()}, dims.bounds)


def _placeholder_shapes(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """The shape, with its symbols, of each user input of the graph in order; None of what is no tensor."""
    kinds = torch.export.graph_signature.InputKind
    wanted = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == kinds.USER_INPUT]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name in wanted:
        value = values.get(name)
        yield value.shape if isinstance(value, Tensor) else None


class _Dims:
    """Turns example values into a catalog's form of inputs, and gathers the dims that they name."""

    def __init__(self, program: torch.export.ExportedProgram, shapes: Iterator[Any]) -> None:
        self._ranges: Mapping[Any, Any] = program.range_constraints
        self._shapes = shapes
        self._names: dict[str, str] = {}
        self.bounds: dict[str, dict[str, int]] = {}

    def item(self, value: Any, path: str) -> dict[str, Any]:
        """One input, or a part of one."""
        if isinstance(value, Tensor):
            return self._tensor(value, next(self._shapes), path)
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.item(part, f"{path}.{index}") for index, part in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": {str(key): self.item(part, f"{path}.{key}") for key, part in value.items()}}
        if value is None or isinstance(value, bool | int | float | str):
            next(self._shapes, None)
            return {"value": value}
        if pytree.tree_is_leaf(value):
            next(self._shapes, None)
        raise SourceError(
            f"the program's input {path!r} is a {type(value).__name__}; write `inputs:` for it, or export it otherwise"
        )

    def _tensor(self, value: Tensor, symbols: Any, path: str) -> dict[str, Any]:
        example = tensor_spec(path, value)
        shape = [self._size(size, symbol, axis) for axis, (size, symbol) in enumerate(zip(value.shape, symbols, strict=True))]
        return {"shape": shape, "dtype": example.dtype, **({"range": list(example.range)} if example.range else {})}

    def _size(self, size: int, symbol: Any, axis: int) -> int | str:
        """The size of an axis: the name of a dim where the program lets it vary of its own, else the example's."""
        expression = getattr(getattr(symbol, "node", None), "expr", None)
        if expression is None:
            return size
        step, free = expression.as_coeff_Mul()  # 4*s0 for multiples of 4
        found = self._ranges.get(free)
        if found is None or not step.is_Integer or step < 1:
            return size
        key, step = str(expression), int(step)
        if key not in self._names:
            name = "batch" if axis == 0 else f"dim_{axis}"
            while name in self.bounds:
                name += "_"
            low = max(1, int(found.lower)) * step
            bounded = found.upper.is_Integer and int(found.upper) < 2**31
            upper = int(found.upper) * step if bounded else max(UNBOUNDED_MAX * step, size)
            self._names[key] = name
            self.bounds[name] = {"min": low, "max": max(low, upper), **({"multiple_of": step} if step > 1 else {})}
        return self._names[key]
