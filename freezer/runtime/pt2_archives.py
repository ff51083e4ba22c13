"""Check .pt2 archives of torch.export before torch opens them, which would evaluate text and
unpickle objects from them.

torch.export.load evaluates the expressions of symbolic sizes with sympy, compiles guards as Python,
and falls back to pickles.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_FUNCTIONS = frozenset(
    """
    Integer Float Rational Add Mul Pow Abs Min Max Mod Eq Ne Lt Le Gt Ge And Or Not Equality
    Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan Piecewise ExprCondPair
    floor ceiling FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv
    LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv
    IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat
    Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor OpaqueUnaryFn_sqrt
    OpaqueUnaryFn_exp OpaqueUnaryFn_log min max abs int float bool
    """.split()  # noqa: SIM905  # a list of 60 strings is harder to read
)
_NAMES = frozenset(("true", "false", "oo", "int_oo", "nan", "L", "torch", "math"))
_METHODS = frozenset(
    (
        "size",
        "stride",
        "storage_offset",
        "dim",
        "sym_min",
        "sym_max",
        "sym_ite",
        "sym_not",
        "floor",
        "ceil",
    )
)
_NUMBER = re.compile(r"-?[0-9.]+(e[-+]?[0-9]+)?|-?inf|nan", re.IGNORECASE)
_NODES = (
    *(
        ast.Expression,
        ast.BinOp,
        ast.UnaryOp,
        ast.BoolOp,
        ast.Compare,
        ast.IfExp,
        ast.Tuple,
        ast.Load,
    ),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
LEGACY = "serialized_exported_program.json"
"""The program in archives that torch wrote before 2.8."""

_OPAQUE = "opaque_obj_"


def code_in(path: str | Path) -> str | None:
    """What torch.export.load would run from an archive, in a few words; None where it only has
    tensors and a graph.

    Raises:
        OSError, RuntimeError, ValueError, BadZipFile: the archive cannot be read.
    """
    from torch.export.pt2_archive._package import PT2ArchiveReader

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        legacy = LEGACY in names
        if legacy and any(name.endswith("archive_format") for name in names):
            return "two programs"
        if legacy:
            return _code_in(names, archive.read)
    with PT2ArchiveReader(
        str(path)
    ) as reader:  # torch's own: another reader might find other files
        return _code_in(reader.get_file_names(), reader.read_bytes)


def _code_in(names: Sequence[str], read: Callable[[str], bytes]) -> str | None:
    lower = [name.lower() for name in names]  # torch finds files in any case
    if len(set(lower)) < len(names):
        return "two files of one name"
    pickled: set[str] = set()
    for name in names:
        if name.lower().endswith(".json") or name.startswith("models/"):
            document = json.loads(read(name))
            if found := _evaluated(document):
                return f"{found} in {name}"
            pickled |= {
                str(item.get("path_name")).lower()
                for item in _objects(document)
                if item.get("use_pickle")
            }
    for name in names:
        base = name.lower().rpartition("/")[2]
        if base.startswith(_OPAQUE) or (
            (base.endswith(".pt") or base in pickled) and _runs(read(name))
        ):
            return f"pickled objects in {name}"
    return None


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON document."""
    rest = [document]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield value
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def _evaluated(document: Any) -> str | None:
    """An expression that is more than arithmetic on sizes."""
    for key, text in _texts(document):
        if not _is_arithmetic(text, guard=key == "guards_code"):
            return f"the expression {text!r:.80}"
    return None


def _texts(document: Any) -> Iterator[tuple[str, str]]:
    """The texts that torch evaluates: symbolic expressions and guards, each once."""
    found: set[tuple[str, str]] = set()
    for value in _objects(document):
        if "expr_str" in value:
            found.add(("expr_str", str(value["expr_str"])))
        found.update(("guards_code", str(text)) for text in value.get("guards_code") or ())
    yield from sorted(found)


def _is_arithmetic(text: str, *, guard: bool) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _plain(tree.body, guard=guard)


def _plain(node: ast.AST, *, guard: bool) -> bool:
    """Whether an expression consists of numbers, symbols, operators and the functions that torch
    writes.
    """
    if isinstance(node, ast.Constant):
        number = isinstance(node.value, str) and _NUMBER.fullmatch(node.value)  # of a Float
        return bool(number) or isinstance(node.value, int | float | bool | None)
    if isinstance(node, ast.Name):
        return node.id in _NAMES or _is_symbol(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Symbol":
        name, flags = node.args, [keyword.value for keyword in node.keywords]
        return (
            len(name) == 1
            and _is_identifier(name[0])
            and all(_plain(flag, guard=guard) for flag in flags)
        )
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        method = (
            guard
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _METHODS
            and _plain(node.func.value, guard=guard)
        )
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        return (known or method) and all(_plain(part, guard=guard) for part in parts)
    if isinstance(node, ast.Subscript):
        key = node.slice
        text = isinstance(key, ast.Constant) and isinstance(key.value, str)
        return guard and _plain(node.value, guard=guard) and (text or _plain(key, guard=guard))
    return isinstance(node, _NODES) and all(
        _plain(part, guard=guard) for part in ast.iter_child_nodes(node)
    )


def _is_symbol(name: str) -> bool:
    return name.rstrip("0123456789") in ("s", "u", "zf", "zuf", "f") and name[-1].isdigit()


def _is_identifier(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
        and node.value.isascii()
    )


def _runs(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return bool(data)  # torch reads an empty file as nothing
    return False
