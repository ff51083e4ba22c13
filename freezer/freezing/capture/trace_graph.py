"""A traced graph as lines that can be compared, and the diff of two graphs.

Equal graphs do the same operations on the same values: constants count with all their bytes, traced shapes do not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freezer.files.digest import digest_bytes
from freezer.freezing.diagnostics.source_lines import line_of_node
from freezer.runtime.tensors import bytes_of, dense_parts, memory_of

_BRACKETS = {"prim::ListConstruct": ("[", "]"), "prim::TupleConstruct": ("(", ")"), "prim::DictConstruct": ("{", "}")}
_MAX_SHORT = 6
_WHERE = "  # "


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One operation.

    Attributes:
        exact: with a number for each value; equal graphs have equal exact lines.
        readable: with the kind of operation in place of each number, so that unrelated changes do not alter the line.
        where: the user's source line; may be empty.
    """

    exact: str
    readable: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """A value as the exact and the readable lines write it."""

    exact: str
    readable: str


def lines_of_graph(module: torch.jit.ScriptModule, names: Sequence[str]) -> list[Line]:
    """The operations of a traced module's inlined graph in order, without those that no result needs.

    Args:
        module: a traced module.
        names: names of its inputs.
    """
    graph: Any = module.inlined_graph
    torch._C._jit_pass_dce(graph)
    inputs = list(graph.inputs())
    values = {inputs[0].unique(): _Value(exact="self", readable="self")}
    values |= {value.unique(): _Value(exact=name, readable=name) for value, name in zip(inputs[1:], names, strict=True)}
    lines = list(_lines(graph, values, ""))
    return [*lines, _line("return", [values[output.unique()] for output in graph.outputs()], "", "")]


def difference(one: Sequence[Line], other: Sequence[Line], from_name: str, to_name: str) -> str:
    """A unified diff of two graphs with the user's lines; empty if they are the same."""
    exact = [[line.exact for line in lines] for lines in (one, other)]
    if exact[0] == exact[1]:
        return ""
    readable = [[line.readable for line in lines] for lines in (one, other)]
    before, after = readable if readable[0] != readable[1] else exact
    text = [f"--- {from_name}", f"+++ {to_name}"]
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(2):
        text.append(f"@@ -{group[0][1] + 1},{group[-1][2] - group[0][1]} +{group[0][3] + 1},{group[-1][4] - group[0][3]} @@")
        for tag, i1, i2, j1, j2 in group:
            sign = " " if tag == "equal" else "-"
            text += [_shown(sign, before[index], one[index].where) for index in range(i1, i2)]
            if tag != "equal":
                text += [_shown("+", after[index], other[index].where) for index in range(j1, j2)]
    return "\n".join(text) + "\n"


def shortened(diff: str) -> str:
    """The first changed lines of a diff and the user's line of the first, in one line."""
    changed = [line.partition(_WHERE) for line in diff.splitlines()[2:] if line.startswith(("-", "+"))]
    changed = [line for line in changed if not line[0][1:].startswith("return(")] or changed
    more = f" and {len(changed) - _MAX_SHORT} more" if len(changed) > _MAX_SHORT else ""
    where = next((place for _, _, place in changed if place), "")
    return ", ".join(f"`{text.strip()}`" for text, _, _ in changed[:_MAX_SHORT]) + more + (f" at {where}" if where else "")


def _shown(sign: str, text: str, where: str) -> str:
    return f"{sign}{text}" + (f"{_WHERE}{where}" if where else "")


def _lines(block: Any, values: dict[int, _Value], indent: str) -> Iterator[Line]:
    """The lines of a graph or block; adds the values that it makes to `values`."""
    for node in block.nodes():
        given = [values[value.unique()] for value in node.inputs()]
        if (inlined := _inlined(node, given)) is not None:
            values[node.output().unique()] = inlined
            continue
        short = node.kind().rpartition("::")[2]
        for output in node.outputs():
            values[output.unique()] = _Value(exact=f"%{len(values)}", readable=short)
        made = ", ".join(values[output.unique()].exact for output in node.outputs())
        yield _line(node.kind(), given, indent, line_of_node(node.sourceRange()) or "", made)
        for inner in node.blocks():
            for value in inner.inputs():
                values[value.unique()] = _Value(exact=f"%{len(values)}", readable="carried")
            yield Line(exact=f"{indent}  block", readable=f"{indent}  block", where="")
            yield from _lines(inner, values, f"{indent}    ")
            yield _line("->", [values[value.unique()] for value in inner.outputs()], f"{indent}    ", "")


def _line(kind: str, given: Sequence[_Value], indent: str, where: str, made: str = "") -> Line:
    exact, readable = _joined(given)
    head = f"{made} = " if made else ""
    return Line(exact=f"{indent}{head}{kind}({exact})", readable=f"{indent}{kind}({readable})", where=where)


def _joined(given: Sequence[_Value]) -> tuple[str, str]:
    return ", ".join(value.exact for value in given), ", ".join(value.readable for value in given)


def _inlined(node: Any, given: Sequence[_Value]) -> _Value | None:
    """A constant, attribute or list, which is written where it is used; None for other nodes."""
    if node.kind() == "prim::Constant":
        text = _constant(node)
        return _Value(exact=text, readable=text)
    if node.kind() == "prim::GetAttr":
        return _Value(exact=f"{given[0].exact}.{node.s('name')}", readable=f"{given[0].readable}.{node.s('name')}")
    if node.kind() not in _BRACKETS:
        return None
    opening, closing = _BRACKETS[node.kind()]
    exact, readable = _joined(given)
    return _Value(exact=opening + exact + closing, readable=opening + readable + closing)


def _constant(node: Any) -> str:
    if not node.hasAttribute("value"):
        return str(node.s("name")) if node.hasAttribute("name") else "None"
    value = node.output().toIValue()
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 1 and value.layout is torch.strided:
        return f"tensor({value.item()!r}, {dtype})"
    parts = [bytes_of(part) for part in dense_parts(value)]
    digest = digest_bytes(b"".join(bytes(memory_of(part)) for part in parts)).removeprefix("sha256:")
    return f"tensor<{dtype}{list(value.shape)} {digest[:12]}>"
