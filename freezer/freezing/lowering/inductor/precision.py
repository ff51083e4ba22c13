"""Lower precision in Inductor: autocast to bfloat16 or float16, TF32 by a setting of calls, and
int8 by torchao's quantizer for x86; and what a compiled graph really runs in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.lowering.lowered import Product, quantizing
from freezer.spec import FLOAT32

PACKED = {"bf16": "bfloat16", "int8": "int8"}
"""Dtype whose layout the packed weights of a precision have."""

_PRODUCTS = ("conv", "linear", "mm", "attention")
"""Parts of the names of operators that compute convolutions and matrix products."""


_CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the products of a precision that autocast makes."""


def autocast_to(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which Inductor traces a program for a precision."""
    if precision not in _CAST_TO:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_CAST_TO[precision])


def in_precision(module: GraphModule, precision: str, captured: Captured) -> GraphModule:
    """The module of a program as Inductor is to compile it in a precision; it is changed."""
    if precision in _CAST_TO:
        _cast_outputs(module)
    return _quantized(module, captured) if precision == "int8" else module


def _cast_outputs(module: GraphModule) -> None:
    """Return each output in the dtype of the program, which autocast changes."""
    output: Any = module.graph.output_node()
    results = []
    with module.graph.inserting_before(output):
        for node in output.args[0]:
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, Tensor) and value.is_floating_point():
                cast = torch.ops.aten.to.dtype
                results.append(module.graph.call_function(cast, (node, value.dtype)))
            else:
                results.append(node)
    output.args = (tuple(results),)
    module.recompile()


def _quantized(module: GraphModule, captured: Captured) -> GraphModule:
    """The module with quantized operators, which Inductor fuses when it freezes them."""
    with (
        quantizing("torchao"),
        quiet("torchao", "torch"),
    ):  # they report libraries for GPUs that they lack
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        exact = [node for node in module.graph.nodes if node.name in captured.exact]
        x86._annotate_nodes_not_quantize(exact)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(module, quantizer)
        for inputs in captured.calibration:
            prepared(*inputs)
        quantized: GraphModule = convert_pt2e(prepared)
        return quantized


def products_of(graph: Any, computes: str) -> Iterator[Product]:
    """Name and precision of each product that Inductor's GraphLowering calls.

    Args:
        graph: the GraphLowering.
        computes: precision of the recipe: whether float32 is multiplied in TF32 is a setting of
            calls, not of the code.
    """
    for scheduled in graph.scheduler.nodes:
        for part in scheduled.get_nodes():
            node = part.node
            kind = str(
                getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", "")
            )
            if part.is_extern() and any(word in kind for word in _PRODUCTS):
                name = str(getattr(node, "origin_node", None) or node.get_name())
                found = _precision(kind, node)
                yield name, computes if (found, computes) == (FLOAT32, "tf32") else found


def _precision(kind: str, node: Any) -> str:
    if kind.startswith("onednn.q"):
        return "int8"
    dtypes = {value.get_dtype() for value in node.inputs if hasattr(value, "get_dtype")}
    return next((name for name, dtype in _CAST_TO.items() if dtype in dtypes), FLOAT32)
