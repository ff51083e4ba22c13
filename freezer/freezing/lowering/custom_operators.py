"""Reject operators that the model's own code registers: an artifact is opened without that code."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Any

import torch

from freezer.artifact.manifest import PayloadKind
from freezer.errors import BuildError
from freezer.freezing.lowering.exported import fx_operators
from freezer.freezing.lowering.torchscript.graph_analysis import inlined, operators

CODE = "CP-CUSTOM-OPERATOR"
TIMEOUT_S = 120

_OF_TORCH = frozenset(("aten", "prim", "prims", "quantized", "sparse", "mkldnn", "mkldnn_prepacked", "onednn", "_quantized"))
"""Operator namespaces of torch itself. Operators of other namespaces are looked up in a fresh process."""

_COMPILED = frozenset(("quantized_decomposed",))
"""Operator namespaces that Inductor compiles to its own code."""

_TARGET = re.compile(r"^(\w+)\.(\w+)\.\w+$")

_ASK = """
import json, sys
import torch
print(json.dumps([name for name in json.load(sys.stdin) if not torch._C._jit_get_schemas_for_operator(name)]))
"""


def check_operators(program: Any, lowering: PayloadKind) -> None:
    """Check that a program only calls operators that a serving process has.

    Raises:
        BuildError: it calls others; code CP-CUSTOM-OPERATOR.
    """
    known = _OF_TORCH | _COMPILED if lowering == "inductor" else _OF_TORCH
    missing = _missing(tuple(sorted(name for name in operators_of(program) if name.partition("::")[0] not in known)))
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


@functools.cache
def _missing(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operators that are missing in a fresh process that only imports torch.

    Raises:
        BuildError: the process fails.
    """
    if not names:
        return ()
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise BuildError(f"could not look up {', '.join(names)} in a fresh process: {error}") from error
    return tuple(json.loads(done.stdout.splitlines()[-1]))
