"""Match the nodes of a lowered graph with those of the exported program by their provenance."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node


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


def matches(source: Graph, lowered: Graph) -> dict[str, str]:
    """The node of a lowered graph that computes the result of a source node, by source node.

    Of several nodes that were made from one, it is the last with the result's shape. Where a node
    vanished into the one before, which nothing else used, that one computes its result: a batch
    norm folded into a convolution.
    """
    of_source: dict[str, Node] = {}
    kept: set[str] = set()
    shapes = {node.name: _shape(node) for node in source.nodes}
    for node in lowered.nodes:
        origin = origin_of(node)
        if node.op in ("placeholder", "output", "get_attr") or origin is None:
            continue
        if origin not in shapes:
            continue
        kept.add(origin)
        if _shape(node) == shapes[origin]:
            of_source[origin] = node
    found: dict[str, str] = {}
    for node in source.nodes:
        if node.name in of_source:
            found[absorbed(node, kept).name] = of_source[node.name].name
    return found


def absorbed(node: Node, kept: set[str]) -> Node:
    """The last of the nodes that vanished into a node: each the only user of the one before, with
    the same shape, and not among those kept.
    """
    while len(node.users) == 1:
        [user] = node.users
        if user.op == "output" or user.name in kept or _shape(user) != _shape(node):
            break
        node = user
    return node


def _shape(node: Node) -> tuple[int, ...] | None:
    """Sizes of a node's result as the graph has them; None if it is not a tensor."""
    value = node.meta.get("val")
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(map(_size, shape))


def _size(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint
