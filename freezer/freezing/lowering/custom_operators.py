"""Reject operators that the model's own code registers: an artifact is opened without that code."""

from __future__ import annotations

import re
from typing import Any

import torch

from freezer.artifact.manifest import PayloadKind
from freezer.errors import BuildError
from freezer.freezing.lowering.exported import fx_operators
from freezer.freezing.lowering.torchscript.graph_analysis import inlined, operators

CODE = "CP-CUSTOM-OPERATOR"
_OF_TORCH = frozenset(
    (
        *("aten", "prim", "prims", "quantized", "_quantized", "sparse", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "rngprims", "inductor_prims", "profiler"),
        *("prepacked", "xnnpack", "static_runtime", "inductor", "export", "quantization", "_native", "_dtensor"),
    )
)
"""Namespaces of the operators that exist in every process that imports torch."""

_COMPILED = frozenset(("quantized_decomposed",))
"""Namespaces of operators that Inductor compiles to its own code."""

_TARGET = re.compile(r"^(\w+)\.(\w+)\.\w+$")


def check_operators(program: Any, lowering: PayloadKind) -> None:
    """Check that a program only calls operators that a serving process has.

    Raises:
        BuildError: it calls others; code CP-CUSTOM-OPERATOR.
    """
    known = _OF_TORCH | _COMPILED if lowering == "inductor" else _OF_TORCH
    missing = sorted(name for name in operators_of(program) if name.partition("::")[0] not in known)
    if missing:
        raise BuildError(
            f"{lowering}: the graph calls {', '.join(missing)}, which only the model's own code registers, so the artifact could "
            "not be served; write it in torch's operations",
            code=CODE,
        )


def operators_of(program: Any) -> set[str]:
    """Operators called by an ExportedProgram or by any method of a ScriptModule: `aten::add`, `torchvision::nms`."""
    if isinstance(program, torch.export.ExportedProgram):
        targets = (_TARGET.match(name) for name in fx_operators(program.graph_module))
        return {f"{found[1]}::{found[2]}" for found in targets if found}
    script = program._c
    return {kind for method in script._method_names() for kind in operators(inlined(script, method))}
