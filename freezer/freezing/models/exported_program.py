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
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from freezer.freezing.models.integer_ranges import arguments_of
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
    guards = getattr(module, "_guards_fn", None)
    if isinstance(guards, nn.Module):
        module._guards_fn = SizeGuards(guards)
    return ExportedModule(module, module.graph).eval()


def _rewrite(module: fx.GraphModule) -> None:
    """Remove checks of dtypes from a graph, and make its sizes traceable."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.full.default:
            size, value = node.args
            typed = node.kwargs.get("dtype") is not None
            if typed and isinstance(value, bool):  # TorchScript cannot fill with a bool
                node.args = (size, int(value))
        checks_dtype = node.target is torch.ops.aten._assert_tensor_metadata.default
        if checks_dtype:
            module.graph.erase_node(node)
        elif node.target in _CASTS and _changes_nothing(node):
            source = node.args[0]
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif node.target in _SIZES:
            node.op = "call_method"
            node.target = _SIZES[node.target]
        elif any(map(_is_size, node.all_input_nodes)):
            _take_traced_sizes(node)
    module.recompile()


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymBool)


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a cast returns its argument: same dtype, device and strides, without a copy."""
    operator = cast(OpOverload, node.target)
    given = arguments_of(operator, node.args, node.kwargs)
    source = cast(fx.Node, node.args[0])
    before = source.meta.get("val")
    after = node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    memory_format = given.get("memory_format")
    if given.get("copy") or memory_format not in (None, torch.preserve_format):
        return False
    if before.dtype != after.dtype or before.layout != after.layout:
        return False
    return before.device == after.device


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
        function = getattr(functions, name, None)
        if isinstance(function, BuiltinFunctionType):  # Python wrappers take other arguments
            node.target = function
            return
    is_method = hasattr(torch._C.TensorBase, name)
    if is_method and name not in vars(Tensor):
        node.op = "call_method"
        node.target = name


def sliced(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice of a tensor along one dim, with the arguments of aten::slice."""
    axis = dim % tensor.dim()
    whole = [slice(None)] * axis
    part = slice(start, end, step)
    return tensor[(*whole, part)]


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
    signature = inspect.signature(program.module().forward)
    names = list(signature.parameters)
    given = dict(zip(names, args, strict=False))
    given.update(kwargs)
    values = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = node.meta.get("val")
    dims = _Dims(program.range_constraints)
    axes: dict[str, dict[int, Dim]] = {}
    leaves, _ = pytree.tree_flatten_with_path(given)
    user_inputs = program.graph_signature.user_inputs
    for (keys, example), name in zip(leaves, user_inputs, strict=False):
        if isinstance(example, Tensor):
            path = ".".join(map(_part, keys))
            value = values[str(name)]
            axes[path] = dims.of(example.shape, value.shape)
    spec, _ = example_spec(given, axes)
    return spec


def _part(key: pytree.KeyEntry) -> str:
    """The part of an input's path for a key of a dict, or an index."""
    index = getattr(key, "idx", key)
    return str(getattr(key, "key", index))


class _Dims:
    """The dims of a program, by their expression."""

    def __init__(self, ranges: Mapping[Any, Any]) -> None:
        self._ranges = ranges
        self._dims: dict[str, Dim] = {}

    def of(self, sizes: Sequence[int], symbols: Sequence[Any]) -> dict[int, Dim]:
        """The dims of a tensor by axis: those that the program lets vary."""
        dims = {}
        for axis, size in enumerate(sizes):
            dim = self._dim(size, symbols[axis], axis)
            if dim is not None:
                dims[axis] = dim
        return dims

    def _dim(self, size: int, symbol: Any, axis: int) -> Dim | None:
        node = getattr(symbol, "node", None)
        expression = getattr(node, "expr", None)
        if expression is None:
            return None
        step, free = expression.as_coeff_Mul()  # 4*s0 for multiples of 4
        bounds = self._ranges.get(free)
        if bounds is None:
            return None
        if not step.is_Integer or step < 1:
            return None
        key = str(expression)
        step = int(step)
        if key in self._dims:
            return self._dims[key]
        name = "batch" if axis == 0 else f"dim_{axis}"
        names = [dim.name for dim in self._dims.values()]
        while name in names:
            name += "_"
        lower = max(1, int(bounds.lower))
        low = lower * step
        high = max(UNBOUNDED_MAX * step, size)
        upper = bounds.upper
        if upper.is_Integer and int(upper) < 2**31:
            high = int(upper) * step
        high = max(low, high)
        dim = Dim(name=name, min=low, max=high, multiple_of=step)
        self._dims[key] = dim
        return dim
