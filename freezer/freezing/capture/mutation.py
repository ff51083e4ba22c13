"""Which parameters and buffers a call of an exported program changes."""

from __future__ import annotations

import operator
import warnings

import torch

from freezer.errors import CaptureError
from freezer.freezing.diagnostics import export_sentence

_NEW = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("conv1d", "conv2d", "conv3d", "linear", "batch_norm", "layer_norm", "cat")
) | {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}
"""Operators whose results are always new memory.

Activations in place follow them in most models.
"""


def changed_state(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of the buffers and parameters that a call changes.

    The signature names no changed buffer until the graph is functionalized, which takes seconds for
    a large model, so only graphs with in-place operations are.

    Raises:
        CaptureError: torch.export cannot tell, for example because two buffers overlap in memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if any(map(_writes, program.graph.nodes)):
            try:
                program = program.run_decompositions({})
            except Exception as error:
                raise CaptureError(
                    "torch.export cannot tell which tensors a call changes:"
                    f" {export_sentence(error)}; register them as buffers, each with memory of its"
                    " own"
                ) from error
    signature = program.graph_signature
    parameters = getattr(signature, "parameters_to_mutate", {})  # missing in torch 2.11
    return tuple(sorted({*signature.buffers_to_mutate.values(), *parameters.values()}))


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operation may change its arguments; higher-order operations are assumed to."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return bool(node.args[5])  # training changes running statistics, which the schema omits
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return schema is None
    written = [
        formal.name
        for formal in schema.arguments
        if formal.alias_info is not None and formal.alias_info.is_write
    ]
    return written != ["self"] or not _has_own_memory(node.args[0])


def _has_own_memory(node: object) -> bool:
    """Whether a result shares no memory with a parameter, buffer or input; False if unknown."""
    while isinstance(node, torch.fx.Node):
        schema = getattr(node.target, "_schema", None)
        if not getattr(schema, "is_mutable", False):
            return node.target in _NEW
        node = node.args[0]
    return False
