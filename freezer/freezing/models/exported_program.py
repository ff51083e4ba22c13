"""ExportedPrograms as sources: a module that can be copied, run in float64 and captured again, and
its input spec.

`program.module()` cannot be put into eval mode, asserts the dtypes of its export, and bakes sizes
into a trace, since operations of torch.ops take no traced sizes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from freezer.freezing.models.samples import example_spec
from freezer.spec import Dim, InputSpec

UNBOUNDED_MAX = 8
"""The largest size of a dim that the program does not bound, unless its example is larger."""


_CASTS = (
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.other,
    torch.ops.aten.to.device,
)

_SIZES = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_numel.default: "numel",
    torch.ops.aten.sym_stride.int: "stride",
}


class ExportedModule(fx.GraphModule):
    """The graph of an ExportedProgram with its weights, in eval mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with (
            warnings.catch_warnings()
        ):  # copying a graph copies its pytree specs, of which one class is deprecated
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            return super().__deepcopy__(memo)


class SizeGuards(nn.Module):
    """Checks inputs against the sizes and constants of a program, except in a trace, where sizes
    are symbolic.
    """

    def __init__(self, check: nn.Module) -> None:
        super().__init__()
        self.check = check

    def forward(self, *inputs: Any) -> None:
        """Raise AssertionError for an input that the program was not exported for."""
        if not torch._C._get_tracing_state():
            self.check(*inputs)


def module_of(program: torch.export.ExportedProgram) -> nn.Module:
    """The program as a module in eval mode, which can be deep-copied and takes the program's args
    and kwargs.

    It still checks sizes and constants. Dtype assertions, and casts that change nothing, are
    removed, so that the module runs in float64 after `.double()` unless the program itself makes
    tensors of another dtype. Constant tensors become buffers. The program is not changed, but its
    weights are shared.
    """
    module = program.module()
    for part in list(module.modules()):
        if isinstance(part, fx.GraphModule):
            _rewrite(part)
    if isinstance(guards := getattr(module, "_guards_fn", None), nn.Module):
        module._guards_fn = SizeGuards(guards)
    return ExportedModule(module, module.graph).eval()


def _rewrite(module: fx.GraphModule) -> None:
    """Remove checks of dtypes from a graph, and make its sizes traceable."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if (
            node.target is torch.ops.aten.full.default
            and isinstance(node.args[1], bool)
            and node.kwargs.get("dtype") is not None
        ):
            node.args = (node.args[0], int(node.args[1]))  # TorchScript cannot fill with a bool
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif node.target in _CASTS and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in _SIZES:
            node.op, node.target = "call_method", _SIZES[node.target]
        elif any(
            isinstance(given.meta.get("val"), torch.SymInt | torch.SymBool)
            for given in node.all_input_nodes
        ):
            _take_traced_sizes(node)
    module.recompile()


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a cast returns its argument: same dtype, device and strides, without a copy."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if given.get("copy") or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return (before.dtype, before.device, before.layout) == (
        after.dtype,
        after.device,
        after.layout,
    ) and (given.get("memory_format") in (None, torch.preserve_format))


def _take_traced_sizes(node: fx.Node) -> None:
    """Call an operation on sizes through its Python function or method, which takes traced
    sizes.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return  # arithmetic of Python
    if node.target is torch.ops.aten._assert_scalar.default:
        node.target = checked
        return
    name = node.target._schema.name.removeprefix("aten::")
    if name in _OWN:
        node.target = _OWN[name]
        return
    for functions in (torch, torch._C._nn):
        if isinstance(
            function := getattr(functions, name, None), BuiltinFunctionType
        ):  # Python wrappers take other arguments
            node.target = function
            return
    if hasattr(torch._C.TensorBase, name) and name not in vars(Tensor):
        node.op, node.target = "call_method", name


def sliced(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice of a tensor along one dim, with the arguments of aten::slice."""
    return tensor[(slice(None),) * (dim % tensor.dim()) + (slice(start, end, step),)]


def checked(condition: bool, message: str) -> None:
    """Raise RuntimeError if a condition on sizes fails, except in a trace, where sizes are
    symbolic.
    """
    if not torch._C._get_tracing_state():
        torch._check(condition, lambda: message)


_OWN: dict[str, Callable[..., Any]] = {"slice": sliced, "split": torch.split}


def spec_of(program: torch.export.ExportedProgram) -> InputSpec | None:
    """The input spec of a program; None if it was saved without example inputs.

    A dim is named `batch` if it is the first axis of an input, otherwise by its axis (`dim_1`).
    Integers get the example's range.

    Raises:
        SpecError: an input has a type that a catalog cannot declare.
    """
    if program.example_inputs is None:
        return None
    args, kwargs = program.example_inputs
    names = list(inspect.signature(program.module().forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kinds = torch.export.graph_signature.InputKind
    nodes = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == kinds.USER_INPUT
    ]
    values = {
        node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"
    }
    dims = _Dims(program.range_constraints)
    axes: dict[str, dict[int, Dim]] = {}
    for (keys, example), node in zip(pytree.tree_flatten_with_path(given)[0], nodes, strict=False):
        if isinstance(example, Tensor):
            path = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
            axes[path] = dims.of(example.shape, values[node].shape)
    return example_spec(given, axes)[0]


class _Dims:
    """The dims of a program, by their expression."""

    def __init__(self, ranges: Mapping[Any, Any]) -> None:
        self._ranges = ranges
        self._dims: dict[str, Dim] = {}

    def of(self, sizes: Sequence[int], symbols: Sequence[Any]) -> dict[int, Dim]:
        """The dims of a tensor by axis: those that the program lets vary."""
        found = (
            (axis, self._dim(size, symbol, axis))
            for axis, (size, symbol) in enumerate(zip(sizes, symbols, strict=True))
        )
        return {axis: dim for axis, dim in found if dim is not None}

    def _dim(self, size: int, symbol: Any, axis: int) -> Dim | None:
        expression = getattr(getattr(symbol, "node", None), "expr", None)
        if expression is None:
            return None
        step, free = expression.as_coeff_Mul()  # 4*s0 for multiples of 4
        found = self._ranges.get(free)
        if found is None or not step.is_Integer or step < 1:
            return None
        key, step = str(expression), int(step)
        if key not in self._dims:
            name = "batch" if axis == 0 else f"dim_{axis}"
            while name in {dim.name for dim in self._dims.values()}:
                name += "_"
            low = max(1, int(found.lower)) * step
            bounded = found.upper.is_Integer and int(found.upper) < 2**31
            upper = int(found.upper) * step if bounded else max(UNBOUNDED_MAX * step, size)
            self._dims[key] = Dim(name=name, min=low, max=max(low, upper), multiple_of=step)
        return self._dims[key]
