"""Operators of captured programs: count them, and reject those that only the model's own code
registers.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from freezer.artifact import PayloadKind
from freezer.errors import BuildError

_OF_TORCH = frozenset(
    (
        "aten",
        "prim",
        "prims",
        "quantized",
        "_quantized",
        "sparse",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "symm_mem",
        "rngprims",
        "inductor_prims",
        "profiler",
        "prepacked",
        "xnnpack",
        "static_runtime",
        "inductor",
        "export",
        "quantization",
        "_native",
        "_dtensor",
    )
)
"""Namespaces of the operators that exist in every process that imports torch."""

_COMPILED = frozenset(("quantized_decomposed",))
"""Namespaces of operators that Inductor compiles to its own code."""

_TARGET = re.compile(r"^(\w+)\.(\w+)\.\w+$")

_NO_OPERATORS = frozenset(
    f"prim::{name}"
    for name in (
        *("Constant", "GetAttr", "ListConstruct", "ListUnpack", "DictConstruct"),
        *("TupleConstruct", "TupleUnpack", "TupleIndex", "TupleSlice"),
    )
)
"""Kinds of TorchScript's nodes that compute nothing: constants, attribute reads, packing and
unpacking.
"""


def check_operators(program: Any, lowering: PayloadKind) -> None:
    """Check that a program only calls operators that a serving process has: an artifact is opened
    without the model's code.

    Raises:
        BuildError: it calls others; code CP-CUSTOM-OPERATOR.
    """
    known = _OF_TORCH | _COMPILED if lowering == "inductor" else _OF_TORCH
    missing = sorted(name for name in operators_of(program) if name.partition("::")[0] not in known)
    if missing:
        raise BuildError(
            f"{lowering}: the graph calls {', '.join(missing)}, which only the model's own code"
            " registers, so the artifact could not be served; write it in torch's operations",
            code="CP-CUSTOM-OPERATOR",
        )


def operators_of(program: Any) -> set[str]:
    """Operators called by an ExportedProgram or by any method of a ScriptModule: `aten::add`,
    `torchvision::nms`.
    """
    kinds: set[str] = set()
    if isinstance(program, torch.export.ExportedProgram):
        for name in fx_operators(program.graph_module):
            target = _TARGET.match(name)
            if target:
                kinds.add(f"{target[1]}::{target[2]}")
        return kinds
    for name in program._c._method_names():
        method = program._c._get_method(name)
        kinds |= set(script_operators(method.inlined_graph))
    return kinds


def fx_operators(module: torch.fx.GraphModule) -> Counter[str]:
    """Number of operators by kind in a graph of torch.fx and in its branches and loops."""
    graphs = (part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule))
    names = (
        str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"
    )
    return Counter(name for name in names if "getitem" not in name)


def script_operators(graph: Any) -> Counter[str]:
    """Number of operators by kind in an inlined graph of TorchScript and in its branches, loops and
    forked tasks.
    """
    found: Counter[str] = Counter()
    waiting = [graph]
    while waiting:
        for node in waiting.pop().nodes():
            kind = node.kind()
            if kind in _NO_OPERATORS:
                continue
            found[kind] += 1
            if kind == "prim::fork":
                task = node.g("Subgraph").copy()
                torch._C._jit_pass_inline(task)
                found += script_operators(task)
            elif kind.startswith("prim::"):  # others have no blocks, and `blocks` is slow
                waiting.extend(node.blocks())
    return found
