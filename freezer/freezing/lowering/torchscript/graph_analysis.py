"""Analysis of TorchScript graphs: operators by kind, attributes that are read, and lines that change them.

The nodes of a graph live as long as the graph, so callers keep it while they use the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freezer.freezing.diagnostics.source_lines import line_of_node

NO_OPERATORS = frozenset(
    f"prim::{name}"
    for name in (
        *("Constant", "GetAttr", "ListConstruct", "ListUnpack", "DictConstruct"),
        *("TupleConstruct", "TupleUnpack", "TupleIndex", "TupleSlice"),
    )
)
"""Kinds of nodes that compute nothing: constants, attribute reads, packing and unpacking."""

_LONG_CHAIN = 100
"""Limit on views of views to follow back to an attribute."""

Path = tuple[str, ...]
"""Names from the module to one of its attributes."""


def inlined(module: Any, method: str) -> Any:
    """An inlined copy of the graph of a C++ module's method, including the tasks it forks."""
    return _with_own_forks(module._get_method(method).inlined_graph.copy())


def _with_own_forks(graph: Any) -> Any:
    """Copy and inline the subgraphs of forks, which a copied graph shares with the original."""
    for node in graph.findAllNodes("prim::fork"):
        copied = node.g("Subgraph").copy()
        torch._C._jit_pass_inline(copied)
        node.g_("Subgraph", _with_own_forks(copied))
    return graph


def walk(block: Any) -> Iterator[Any]:
    """The nodes of a graph or block, then those of the blocks within."""
    waiting = [block]
    while waiting:
        for node in waiting.pop(0).nodes():
            yield node
            kind = node.kind()
            if kind.startswith("prim::") and kind not in NO_OPERATORS:  # `blocks` is slow
                waiting.extend(node.blocks())


def operators(graph: Any) -> Counter[str]:
    """Number of operators by kind, including those of forked tasks."""
    found: Counter[str] = Counter()
    for node in walk(graph):
        if node.kind() not in NO_OPERATORS:
            found[node.kind()] += 1
        if node.kind() == "prim::fork":
            found += operators(node.g("Subgraph"))
    return found


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The graph of a method or of a forked task.

    Attributes:
        owners: path of the module or submodule that an input is, by `unique()` of the input; the empty path is the module itself.
    """

    graph: Any
    owners: Mapping[int, Path]

    def attribute(self, node: Any) -> Path | None:
        """Path of the attribute that a GetAttr or SetAttr node names; None if it belongs to another object."""
        owner = self._path(node.inputsAt(0))
        return None if owner is None else (*owner, node.s("name"))

    def _path(self, value: Any) -> Path | None:
        names: list[str] = []
        while value.node().kind() == "prim::GetAttr":
            names.insert(0, value.node().s("name"))
            value = value.node().input()
        start = self.owners.get(value.unique())
        return None if start is None else (*start, *names)

    def forked(self) -> Iterator[Scope]:
        """The scopes of the graph's forked tasks."""
        for node in self.graph.findAllNodes("prim::fork"):
            graph = node.g("Subgraph")
            given = zip(graph.inputs(), node.inputs(), strict=True)
            paths = {inner.unique(): self._path(outer) for inner, outer in given}
            yield Scope(graph=graph, owners={key: path for key, path in paths.items() if path is not None})

    def reads(self) -> Iterator[tuple[Path, Any]]:
        """Each read of an attribute that is not an object, with its node; without those of forked tasks."""
        for node in self.graph.findAllNodes("prim::GetAttr"):
            if not isinstance(node.output().type(), torch._C.ClassType):
                path = self.attribute(node)
                if path is not None:
                    yield path, node


def scopes(graph: Any) -> Iterator[Scope]:
    """The scopes of a method's graph and of its forked tasks."""
    first = next(iter(graph.inputs()), None)
    waiting = [Scope(graph=graph, owners={} if first is None else {first.unique(): ()})]
    while waiting:
        scope = waiting.pop()
        yield scope
        waiting += scope.forked()


def has_attribute(module: Any, path: Path) -> bool:
    """Whether a C++ module has an attribute at a path."""
    for name in path[:-1]:
        if not module.hasattr(name):
            return False
        module = module.getattr(name)
    return bool(module.hasattr(path[-1]))


def attribute_of(module: Any, path: Path) -> Any:
    """The value of an attribute of a C++ module."""
    for name in path:
        module = module.getattr(name)
    return module


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an attribute's value, also within lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A place where a method changes an attribute.

    Attributes:
        how: `sets it`, or `changes it in place (aten::add_)`.
        line: line of the user's source, if the graph has it.
    """

    method: str
    how: str
    line: str | None

    def __str__(self) -> str:
        return f"`{self.method}` {self.how}" + (f" at {self.line}" if self.line else "")


def mutations(graphs: Mapping[str, Any]) -> dict[Path, Mutation]:
    """The attributes that methods change, each with the first place that does.

    An attribute is changed where it is set, and where torch's alias analysis finds that a node may write to its value.

    Args:
        graphs: inlined graphs of the methods, by name.
    """
    found: dict[Path, Mutation] = {}
    for method, graph in graphs.items():
        for scope in scopes(graph):
            _note_mutations(scope, method, found)
    return found


def _note_mutations(scope: Scope, method: str, found: dict[Path, Mutation]) -> None:
    for node in scope.graph.findAllNodes("prim::SetAttr"):
        path = scope.attribute(node)
        if path is not None:
            found.setdefault(path, Mutation(method=method, how="sets it", line=_line(node) or _line(node.inputsAt(1).node())))
    aliases = scope.graph.alias_db(True)  # True: as in a frozen module, each read is a separate value
    writes = [(node, given) for node in walk(scope.graph) for given in _written(node)]
    for path, node in scope.reads():
        if path not in found and aliases.has_writers(node.output()):
            mine = [(writer, given) for writer, given in writes if aliases.may_contain_alias(node.output(), given)]
            sure = [writer for writer, given in mine if _viewed(scope, given) == path]
            writer = (sure or [writer for writer, _ in mine] or [None])[0]
            how = "changes it in place" if sure else "may change it in place, according to the alias analysis"
            kind = f" ({writer.kind()})" if writer else ""
            found[path] = Mutation(method=method, how=f"{how}{kind}", line=_line(writer) if writer else None)


def _viewed(scope: Scope, value: Any) -> Path | None:
    """The attribute that a value is or views, following first inputs; None if there is none."""
    for _ in range(_LONG_CHAIN):
        node = value.node()
        if node.kind() == "prim::GetAttr":
            return scope.attribute(node)
        if not node.inputsSize() or node.kind() == "prim::Param":
            return None
        value = node.inputsAt(0)
    return None


def _line(node: Any) -> str | None:
    return line_of_node(node.sourceRange())


def _written(node: Any) -> list[Any]:
    """The values that a node writes into, by its schema."""
    text = node.schema()
    if "!" not in text:
        return []
    arguments = torch._C.parse_schema(text).arguments
    return [
        node.inputsAt(index)
        for index, argument in enumerate(arguments[: node.inputsSize()])
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def tensor_constants(graphs: Collection[Any]) -> list[Tensor]:
    """The tensor constants of graphs."""
    nodes = [node for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    return [tensor for node in nodes for tensor in tensors_in(node.output().toIValue())]
