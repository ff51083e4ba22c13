"""A traced graph as lines that can be compared, and the difference of two, for people.

Equal graphs do the same operations on the same values: constants count with all their bytes, shapes that the tracer noted do not.
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
from freezer.runtime.tensor_bytes import bytes_of, dense_parts, memory_of

_BRACKETS = {"prim::ListConstruct": ("[", "]"), "prim::TupleConstruct": ("(", ")"), "prim::DictConstruct": ("{", "}")}
_INLINE = ("prim::Constant", "prim::GetAttr", *_BRACKETS)
_MAX_SHORT = 6
_WHERE = "  # "


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One operation.

    Attributes:
        exact: with a number for each value; two graphs are the same where these are.
        readable: with the kind of operation for each value that one gave, so that the same operation reads alike in two graphs.
        where: the user's line that called it; empty where none is the user's.
    """

    exact: str
    readable: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    exact: str
    readable: str


def lines_of_graph(module: torch.jit.ScriptModule, names: Sequence[str]) -> list[Line]:
    """The operations of a module's inlined graph in order; those that no result needs are left out.

    Args:
        module: a traced module.
        names: of its inputs.
    """
    graph: Any = module.inlined_graph
    torch._C._jit_pass_dce(graph)
    inputs = list(graph.inputs())
    values = {inputs[0].unique(): _Value(exact="self", readable="self")}
    values |= {value.unique(): _Value(exact=name, readable=name) for value, name in zip(inputs[1:], names, strict=True)}
    lines = list(_lines(graph, values, ""))
    results = [values[output.unique()] for output in graph.outputs()]
    return [*lines, _line("return", results, "", "")]


def difference(one: Sequence[Line], other: Sequence[Line], from_name: str, to_name: str) -> str:
    """A unified diff of two graphs with the user's lines; empty where they are the same."""
    if [line.exact for line in one] == [line.exact for line in other]:
        return ""
    forms = (
        [[line.readable for line in lines] for lines in (one, other)],
        [[line.exact for line in lines] for lines in (one, other)],
    )
    before, after = forms[0] if forms[0][0] != forms[0][1] else forms[1]
    text = [f"--- {from_name}", f"+++ {to_name}"]
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(2):
        text.append(f"@@ -{group[0][1] + 1},{group[-1][2] - group[0][1]} +{group[0][3] + 1},{group[-1][4] - group[0][3]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                text += [_shown(" ", before[index], one[index].where) for index in range(i1, i2)]
            else:
                text += [_shown("-", before[index], one[index].where) for index in range(i1, i2)]
                text += [_shown("+", after[index], other[index].where) for index in range(j1, j2)]
    return "\n".join(text) + "\n"


def shortened(diff: str) -> str:
    """The first changed lines of a diff, and where the first was called, in one line."""
    changed = [line.partition(_WHERE) for line in diff.splitlines()[2:] if line.startswith(("-", "+"))]
    changed = [line for line in changed if not line[0][1:].startswith("return(")] or changed
    more = f" and {len(changed) - _MAX_SHORT} more" if len(changed) > _MAX_SHORT else ""
    where = next((place for _, _, place in changed if place), "")
    return ", ".join(f"`{text.strip()}`" for text, _, _ in changed[:_MAX_SHORT]) + more + (f" at {where}" if where else "")


def _shown(sign: str, text: str, where: str) -> str:
    return f"{sign}{text}" + (f"{_WHERE}{where}" if where else "")


def _lines(block: Any, values: dict[int, _Value], indent: str) -> Iterator[Line]:
    """The lines of a graph or block; the values that it makes are added to `values`."""
    for node in block.nodes():
        given = [values[value.unique()] for value in node.inputs()]
        if node.kind() in _INLINE:
            values[node.output().unique()] = _inlined(node, given)
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
    exact, readable = (", ".join(getattr(value, form) for value in given) for form in ("exact", "readable"))
    head = f"{made} = " if made else ""
    return Line(exact=f"{indent}{head}{kind}({exact})", readable=f"{indent}{kind}({readable})", where=where)


def _inlined(node: Any, given: Sequence[_Value]) -> _Value:
    """What is written where its value is used: constants, attributes, and lists of values."""
    if node.kind() == "prim::Constant":
        text = _constant(node)
        return _Value(exact=text, readable=text)
    if node.kind() == "prim::GetAttr":
        return _Value(**{form: f"{getattr(given[0], form)}.{node.s('name')}" for form in ("exact", "readable")})
    opening, closing = _BRACKETS[node.kind()]
    return _Value(
        **{form: opening + ", ".join(getattr(value, form) for value in given) + closing for form in ("exact", "readable")}
    )


def _constant(node: Any) -> str:
    if not node.hasAttribute("value"):
        return str(node.s("name")) if node.hasAttribute("name") else "None"
    value = node.output().toIValue()
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 1 and value.layout is torch.strided:
        return f"tensor({value.item()!r}, {str(value.dtype).removeprefix('torch.')})"
    return f"tensor<{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_digest(value)}>"


def _digest(tensor: Tensor) -> str:
    """Hex digits that tell the bytes of two tensors apart."""
    parts = b"".join(bytes(memory_of(data)) for part in dense_parts(tensor) for data in (bytes_of(part),))
    return digest_bytes(parts).removeprefix("sha256:")[:12]
