"""The module of an ExportedProgram, fit to be a source: copied, run in float64, captured again.

`program.module()` gives a module that cannot be put into eval mode, whose graph asserts the dtypes that it was exported with, and
of which torch.jit.trace keeps the sizes of its example for ever: operations of torch.ops take no traced sizes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from freezer.errors import SourceError
from freezer.freezing.models.samples import tensor_spec
from freezer.spec.inputs import InputSpec
from freezer.spec.parse import declared_spec

UNBOUNDED_MAX = 8
"""The largest size of a dim that the program leaves open upwards, unless its example is larger."""


_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.other, torch.ops.aten.to.device)

_SIZES = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_numel.default: "numel",
    torch.ops.aten.sym_stride.int: "stride",
}


class ExportedModule(fx.GraphModule):
    """The graph of an ExportedProgram with its weights; called as the program is, in eval mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with warnings.catch_warnings():  # copying a graph copies its pytree specs, one class of which is deprecated
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            return super().__deepcopy__(memo)


class SizeGuards(nn.Module):
    """Holds inputs to the sizes and constants that a program was exported for. A trace, which has no sizes to hold, skips it."""

    def __init__(self, check: nn.Module) -> None:
        super().__init__()
        self.check = check

    def forward(self, *inputs: Any) -> None:
        """Raise AssertionError where an input is not as the program was exported for."""
        if not torch._C._get_tracing_state():
            self.check(*inputs)


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """The program as a module in eval mode, which may be deep-copied and takes the program's args and kwargs.

    Sizes and constants are held to what the program was exported for. What only held its dtypes is taken out: assertions, and
    casts that change nothing. So the module runs in float64 after `.double()`, unless the program makes tensors of another dtype
    itself. Constant tensors become buffers. The program is not changed, but its weights are shared.
    """
    module = program.module()
    for part in list(module.modules()):
        if isinstance(part, fx.GraphModule):
            _rewrite(part)
    if isinstance(guards := getattr(module, "_guards_fn", None), nn.Module):
        module._guards_fn = SizeGuards(guards)
    return ExportedModule(module, module.graph).eval()


def _rewrite(module: fx.GraphModule) -> None:
    """Take what holds dtypes out of a graph, and let its sizes be traced."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.full.default and isinstance(node.args[1], bool) and node.kwargs.get("dtype") is not None:
            node.args = (node.args[0], int(node.args[1]))  # TorchScript fills with no bool, and says so in an internal assertion
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif node.target in _CASTS and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in _SIZES:
            node.op, node.target = "call_method", _SIZES[node.target]
        elif any(isinstance(given.meta.get("val"), torch.SymInt | torch.SymBool) for given in node.all_input_nodes):
            _take_traced_sizes(node)
    module.recompile()


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a cast gives what it takes: dtype, device and strides as they were, and no copy."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if given.get("copy") or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout) and (
        given.get("memory_format") in (None, torch.preserve_format)
    )


def _take_traced_sizes(node: fx.Node) -> None:
    """Call an operation that is given sizes by its Python function or method, which takes traced ones too."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return  # arithmetic of Python
    if node.target is torch.ops.aten._assert_scalar.default:
        node.target = held
        return
    name = node.target._schema.name.removeprefix("aten::")
    if name in _OWN:
        node.target = _OWN[name]
        return
    for functions in (torch, torch._C._nn):
        if isinstance(function := getattr(functions, name, None), BuiltinFunctionType):  # what Python wraps takes other arguments
            node.target = function
            return
    if hasattr(torch._C.TensorBase, name) and name not in vars(Tensor):
        node.op, node.target = "call_method", name


def sliced(tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """A slice of a tensor along one dim, as aten::slice takes it."""
    return tensor[(slice(None),) * (dim % tensor.dim()) + (slice(start, end, step),)]


def held(condition: bool, message: str) -> None:
    """Raise RuntimeError where a condition on sizes does not hold. A trace, which has no sizes to hold, skips it."""
    if not torch._C._get_tracing_state():
        torch._check(condition, lambda: message)


_OWN: dict[str, Callable[..., Any]] = {"slice": sliced, "split": torch.split}


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
