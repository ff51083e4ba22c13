"""Exported programs: store one as it was captured, which runs wherever torch runs; and its nodes in
what converters and engines make of it, by the provenance that torch records and the names that they
keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from freezer.artifact import FreezingReport, KeptTensor, stored_as_captured
from freezer.errors import BuildError, described
from freezer.freezing.capture import Captured
from freezer.freezing.lowering.lowered import Lowered, fx_operators
from freezer.freezing.recipes import Settings
from freezer.freezing.target import Target
from freezer.runtime.loaders import on_first
from freezer.runtime.tensors import identity_of, tensors_bytes

SUFFIX = ".pt2"

NodeNames = Mapping[str, str]
"""Source node by name of a value."""


def report_before(captured: Captured) -> FreezingReport:
    """The operators and weights of a captured program.

    Compiling may free the weights, so they are counted before.
    """
    program = captured.program
    names = [*program.graph_signature.parameters, *program.graph_signature.buffers]
    known = {**program.constants, **program.state_dict}
    tensors = [known[name] for name in names]
    return FreezingReport(
        ops_before=fx_operators(program.graph_module),
        num_constants=len(set(map(identity_of, tensors))),
        constants_bytes=tensors_bytes(tensors),
        constants=tuple(map(captured.source_name, names)),
    )


def build(
    captured: Captured,
    path: Path,
    target: Target,
    settings: Settings,
) -> Lowered:
    """Write a .pt2 file that torch.export.load reads, without the program's example inputs, which
    are pickled.

    Raises:
        BuildError: the program cannot be serialized.
    """
    program = copy(on_first(captured.program, target.device))
    program.example_inputs = None
    try:
        torch.export.save(program, str(path))
    except Exception as error:
        raise BuildError(f"torch.export.save: {described(error)}") from error
    ops = dict(fx_operators(captured.program.graph_module))
    report = FreezingReport(
        ops_before=ops,
        ops_after=ops,
        kept=tuple(
            KeptTensor(
                name=captured.source_name(name),
                reason="`forward` changes it",
            )
            for name in captured.mutates
        ),
        notes=(stored_as_captured(len(captured.program.state_dict)),),
    )
    return Lowered(report=report)


def check_real(program: ExportedProgram) -> None:
    """Reject a program with complex inputs or outputs.

    Raises:
        BuildError: it has such.
    """
    signature = program.graph_signature
    names = [*signature.user_inputs, *signature.user_outputs]
    if any(value.is_complex() for value in values_named(program, names)):
        raise BuildError(
            "an input or output is complex, which the engine lacks; use torch.view_as_real outside"
            " the model"
        )


def output_orders(program: ExportedProgram) -> tuple[tuple[int, ...] | None, ...]:
    """For each output the order of its dims in memory, largest stride first; None if it is
    contiguous.

    Expanded outputs count as contiguous, and so do those whose sizes depend on values, since the
    program contains no example of them.
    """
    orders = []
    for value in values_named(program, program.graph_signature.user_outputs):
        strides = [  # in the example of the export; None where they depend on values
            stride if isinstance(stride, int) else stride.node.hint for stride in value.stride()
        ]
        single: list[int] = []  # their strides are arbitrary
        others: list[int] = []
        for dim, size in enumerate(value.shape):
            is_single = isinstance(size, int) and size == 1
            (single if is_single else others).append(dim)
        ordered = others
        if None not in strides and 0 not in strides:
            ordered = sorted(others, key=lambda dim: (-strides[dim], dim))
        orders.append(None if ordered == others else (*single, *ordered))
    return tuple(orders)


def values_named(program: ExportedProgram, names: Sequence[object]) -> list[Any]:
    """The fake tensors of a program's inputs or outputs."""
    nodes = {node.name: node for node in program.graph.nodes}
    return [nodes[name].meta["val"] for name in names]


def forget_origins(graph: Graph) -> None:
    """Let the nodes of a graph be the origins of all that is made from it, not those of an earlier
    graph.
    """
    for node in graph.nodes:
        node.meta.pop("from_node", None)


def origin_of(node: Node) -> str | None:
    """Name of the exported program's node that a node was made from; None if that is unknown.

    torch records it in `from_node`, the last pass first.
    """
    sources = node.meta.get("from_node") or []
    name = None
    while sources:
        name = sources[-1].name
        sources = sources[-1].from_node
    return name


@contextlib.contextmanager
def decomposed(program: ExportedProgram) -> Iterator[list[ExportedProgram]]:
    """Keep the programs that a converter makes of a program, the last of which it converts."""
    forget_origins(program.graph)
    made: list[ExportedProgram] = []
    decompose = ExportedProgram.run_decompositions

    def kept(program: ExportedProgram, *args: Any, **kwargs: Any) -> ExportedProgram:
        made.append(decompose(program, *args, **kwargs))
        return made[-1]

    with mock.patch.object(ExportedProgram, "run_decompositions", kept):
        yield made


def names_in(made: Sequence[ExportedProgram]) -> NodeNames:
    """The source node of each node of the last of some decomposed programs."""
    origins = {node.name: origin_of(node) for node in made[-1].graph.nodes}
    return {name: origin for name, origin in origins.items() if origin is not None}


def known_names(port: Any, names: NodeNames) -> list[str]:
    """The names of a port of OpenVINO that are those of nodes, without the index that it adds."""
    plain = [name.partition(":")[0] for name in port.get_names()]
    return [name for name in plain if name in names]


def operators_computing(
    nodes: Collection[str],
    operators: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    names: NodeNames,
) -> list[str]:
    """The operators of a converted graph that compute given source nodes.

    Args:
        nodes: source nodes.
        operators: name of each, and names of the values that it makes and reads, in an order in
            which they can run.
        names: source node by name of a value. An operator that makes none of these is part of the
            first one after it that does.
    """
    found = []
    sources = dict(names)
    for operator, made, read in reversed(operators):
        source = next((sources[value] for value in made if value in sources), "")
        sources |= {value: source for value in read if value not in names}
        if source in nodes:
            found.append(operator)
    return found
