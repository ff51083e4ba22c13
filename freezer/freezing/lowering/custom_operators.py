"""Operators that a captured program calls and a process that serves it lacks: those that the model's own code registers.

An artifact opens without the code of its source, so such a program would be built, judged, and fail where it is served.
"""

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
"""Namespaces of operators that any process has which imports torch. Those of others are asked for in one."""

_COMPILED = frozenset(("quantized_decomposed",))
"""Namespaces of operators that Inductor writes code of its own for."""

_TARGET = re.compile(r"^(\w+)\.(\w+)\.\w+$")

_ASK = """
import json, sys
import torch
print(json.dumps([name for name in json.load(sys.stdin) if not torch._C._jit_get_schemas_for_operator(name)]))
"""


def check_operators(program: Any, lowering: PayloadKind) -> None:
    """Hold that a program calls no operator that only this process has.

    Raises:
        BuildError: it does; code CP-CUSTOM-OPERATOR.
    """
    known = _OF_TORCH | _COMPILED if lowering == "inductor" else _OF_TORCH
    missing = _missing(tuple(sorted(name for name in operators_of(program) if name.partition("::")[0] not in known)))
    if missing:
        raise BuildError(
            f"{lowering}: the graph calls {', '.join(missing)}, which the model's own code registers, and a process that serves "
            "the artifact lacks; write it in torch's operations",
            code=CODE,
        )


def operators_of(program: Any) -> set[str]:
    """The operators that an ExportedProgram, or any method of a ScriptModule, calls: `aten::add`, `torchvision::nms`."""
    if isinstance(program, torch.export.ExportedProgram):
        targets = (_TARGET.match(name) for name in fx_operators(program.graph_module))
        return {f"{found[1]}::{found[2]}" for found in targets if found}
    script = program._c
    return {kind for method in script._method_names() for kind in operators(inlined(script, method))}


@functools.cache
def _missing(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some operators that a process lacks which has imported torch and nothing else.

    Raises:
        BuildError: such a process does not answer.
    """
    if not names:
        return ()
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except subprocess.SubprocessError as error:
        text = f"whether a process that serves the artifact has {', '.join(names)} cannot be found out"
        raise BuildError(f"{text}: {error}") from error
    return tuple(json.loads(done.stdout.splitlines()[-1]))
