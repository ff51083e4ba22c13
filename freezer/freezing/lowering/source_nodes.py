"""Nodes of an exported program in what converters and engines make of it: by the provenance that
torch records, and by the names that converters keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch.export import ExportedProgram
from torch.fx import Graph, Node


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
    sources: list[Any] = node.meta.get("from_node") or []
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


def names_in(program: ExportedProgram) -> dict[str, str]:
    """The source node of each node of a decomposed program."""
    origins = {node.name: origin_of(node) for node in program.graph.nodes}
    return {name: origin for name, origin in origins.items() if origin is not None}


def known_names(port: Any, names: Mapping[str, str]) -> list[str]:
    """The names of a port of OpenVINO that are those of nodes, without the index that it adds."""
    plain = [name.partition(":")[0] for name in port.get_names()]
    return [name for name in plain if name in names]


def operators_of(
    nodes: Collection[str],
    operators: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    names: Mapping[str, str],
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
