"""ExportedPrograms as sources: a module that can be copied, run in float64 and captured again, and
its input spec.

`program.module()` cannot be put into eval mode, and asserts the dtypes of its export. It is
captured by torch.export again, never traced: operations of torch.ops take no traced sizes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
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


class ExportedModule(GraphModule):
    """The graph of an ExportedProgram with its weights, in eval mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        # copying a graph copies its pytree specs, of which one class is deprecated
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            return super().__deepcopy__(memo)


def module_of(program: ExportedProgram) -> nn.Module:
    """The program as a module in eval mode, which can be deep-copied and takes the program's args
    and kwargs.

    It still checks sizes and constants. Dtype assertions, and casts that change nothing, are
    removed, so that the module runs in float64 after `.double()` unless the program itself makes
    tensors of another dtype. Constant tensors become buffers. The program is not changed, but its
    weights are shared.
    """
    module = program.module()
    for part in list(module.modules()):
        if isinstance(part, GraphModule):
            _rewrite(part)
    return ExportedModule(module, module.graph).eval()


def _rewrite(module: GraphModule) -> None:
    """Remove checks of dtypes from a graph, and casts that change nothing."""
    for node in list(module.graph.nodes):
        if node.target in _CASTS and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is not torch.ops.aten._assert_tensor_metadata.default:
            continue
        module.graph.erase_node(node)
    module.recompile()


def _changes_nothing(node: Node) -> bool:
    """Whether a cast returns its argument: same dtype, device and strides, without a copy."""
    given = arguments_of(cast(OpOverload, node.target), node.args, node.kwargs)
    before = cast(Node, node.args[0]).meta.get("val")
    after = node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if given.get("copy") or given.get("memory_format") not in (None, torch.preserve_format):
        return False
    same_type = (before.dtype, before.layout) == (after.dtype, after.layout)
    return same_type and before.device == after.device


def spec_of(program: ExportedProgram) -> InputSpec | None:
    """The input spec of a program; None if it was saved without example inputs.

    A dim is named `batch` if it is the first axis of an input, otherwise by its axis (`dim_1`).
    Integers get the example's range.

    Raises:
        SpecError: an input has a type that a catalog cannot declare.
    """
    if program.example_inputs is None:
        return None
    args, kwargs = program.example_inputs
    names = inspect.signature(program.module().forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = program.graph.find_nodes(op="placeholder")
    values = {node.name: node.meta.get("val") for node in inputs}
    known: dict[str, Dim] = {}
    axes: dict[str, dict[int, Dim]] = {}
    leaves, _ = pytree.tree_flatten_with_path(given)
    for (keys, example), name in zip(leaves, program.graph_signature.user_inputs, strict=False):
        if isinstance(example, Tensor):
            path = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
            axes[path] = {}
            for axis, symbol in enumerate(values[str(name)].shape):
                dim = _dim(program.range_constraints, known, symbol, axis, example.shape[axis])
                if dim is not None:
                    axes[path][axis] = dim
    spec, _ = example_spec(given, axes)
    return spec


def _dim(
    ranges: Mapping[Any, Any], known: dict[str, Dim], symbol: Any, axis: int, size: int
) -> Dim | None:
    """The dim of an axis, if the program lets it vary.

    Args:
        ranges: bounds of the program's symbols.
        known: dims by their expression, to which it is added.
        symbol: size of the axis in the program.
        axis: index of the axis.
        size: size of the axis in the example.
    """
    if not isinstance(symbol, torch.SymInt):
        return None
    expression = symbol.node.expr
    if str(expression) in known:
        return known[str(expression)]
    step, free = expression.as_coeff_Mul()  # 4*s0 for multiples of 4
    bounds = ranges.get(free)
    if bounds is None or not step.is_Integer or step < 1:
        return None
    step = int(step)
    name = "batch" if axis == 0 else f"dim_{axis}"
    while name in [dim.name for dim in known.values()]:
        name += "_"
    low = max(1, int(bounds.lower)) * step
    high = max(UNBOUNDED_MAX * step, size)
    if bounds.upper.is_Integer and int(bounds.upper) < 2**31:
        high = int(bounds.upper) * step
    elif low == 2 * step:  # of Dim.AUTO and Dim.DYNAMIC; torch runs such a program with 1, too
        low = step
    dim = Dim(name=name, min=low, max=max(low, high), multiple_of=step)
    known[str(expression)] = dim
    return dim
