"""Open programs of torch.export (.pt2), after a check that the file runs no code.

torch.export.load evaluates the expressions of symbolic sizes with sympy, compiles guards as Python,
and falls back to pickles. So archives are checked before torch opens them.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from freezer.errors import IntegrityError
from freezer.runtime.contract import Runner
from freezer.runtime.devices import CPU
from freezer.runtime.tensors import program_tensors

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
_NAMES = frozenset("true false oo int_oo nan L torch math".split())  # noqa: SIM905
_METHODS = frozenset(
    "size stride storage_offset dim sym_min sym_max sym_ite sym_not floor ceil".split()  # noqa: SIM905
)
_SYMBOL = re.compile(r"(s|u|zf|zuf|f)[0-9]+")
_NUMBER = re.compile(r"-?[0-9.]+(e[-+]?[0-9]+)?|-?inf|nan", re.IGNORECASE)
_OPERATIONS = (
    ast.BinOp
    | ast.UnaryOp
    | ast.BoolOp
    | ast.Compare
    | ast.IfExp
    | ast.Tuple
    | ast.Load
    | ast.operator
    | ast.unaryop
    | ast.boolop
    | ast.cmpop
)
LEGACY = "serialized_exported_program.json"
"""The program in archives that torch wrote before 2.8."""

_OPAQUE = "opaque_obj_"


def open_exported(path: Path, settings: Mapping[str, object], device: torch.device = CPU) -> Runner:
    """Open a program on a device.

    Programs are stored on the CPU or on the first GPU, and then moved to the device.

    Raises:
        IntegrityError: the file would run code when torch opens it.
    """
    code = code_in(path)
    if code is not None:
        raise IntegrityError(
            f"{path} contains {code}, which torch would run when it opens the file; Coldpress"
            " writes no such file"
        )
    program = _moved(torch.export.load(str(path)), device)
    return _graph_of(program) or program.module()


def _graph_of(program: ExportedProgram) -> Runner | None:
    """The program's graph as a function of its tensor inputs; None if it needs more than tensors,
    or returns more than results.

    Operations in place change the tensors of the program. A functionalized program returns changed
    state as such an output.

    `program.module()` checks the inputs again, in Python, and looks up each parameter by its path:
    0.2 ms a call for a small model.
    """
    signature = program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    state: list[object] = []
    num_inputs = 0
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            num_inputs += 1
            continue
        tensor = tensors.get(spec.target)
        if num_inputs or not isinstance(tensor, Tensor):
            return None  # state comes first
        state.append(tensor)
    for output in signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            return None
    return partial(program.graph_module.forward, *state)


def on_first(
    program: ExportedProgram,
    device: torch.device,
) -> ExportedProgram:
    """The program as stored: a GPU program on the first GPU, which every process with a GPU has."""
    return program if device.type != "cuda" else _moved(program, torch.device("cuda", 0))


def _moved(
    program: ExportedProgram,
    device: torch.device,
) -> ExportedProgram:
    from torch.export.passes import move_to_device_pass

    examples = pytree.tree_leaves(program.example_inputs)
    source = CPU
    for leaf in (*program_tensors(program), *examples):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            source = leaf.device
            break
    if source == device:
        return program
    return move_to_device_pass(program, {str(source): str(device)})


def code_in(path: str | Path) -> str | None:
    """The part of an archive that torch.export.load would run, in a few words; None where it only
    has tensors and a graph.

    Raises:
        OSError, RuntimeError, ValueError, BadZipFile: the archive cannot be read.
    """
    from torch.export.pt2_archive._package import PT2ArchiveReader

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if LEGACY in names:
            if any(name.endswith("archive_format") for name in names):
                return "two programs"
            return _code_in(names, archive.read)
    with PT2ArchiveReader(str(path)) as reader:  # torch's own: another might find other files
        return _code_in(reader.get_file_names(), reader.read_bytes)


def _code_in(
    names: Sequence[str],
    read: Callable[[str], bytes],
) -> str | None:
    if len({name.lower() for name in names}) < len(names):  # torch finds files in any case
        return "two files of one name"
    pickled: set[str] = set()
    for name in names:
        if not name.lower().endswith(".json") and not name.startswith("models/"):
            continue
        for record in _objects(json.loads(read(name))):
            text = _evaluated(record)
            if text is not None:
                return f"the expression {text!r:.80} in {name}"
            if record.get("use_pickle"):
                pickled.add(str(record.get("path_name")).lower())
    for name in names:
        _, _, base = name.lower().rpartition("/")
        is_pickle = base.endswith(".pt") or base in pickled
        if base.startswith(_OPAQUE) or (is_pickle and _runs(read(name))):
            return f"pickled objects in {name}"
    return None


def _objects(document: object) -> Iterator[dict[str, Any]]:
    """All objects of a JSON document."""
    rest = [document]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield value
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def _evaluated(record: dict[str, Any]) -> str | None:
    """An expression of an object that is more than arithmetic on sizes."""
    for guard in record.get("guards_code") or ():
        if not _is_arithmetic(str(guard), guard=True):
            return str(guard)
    text = str(record.get("expr_str", "0"))
    return None if _is_arithmetic(text, guard=False) else text


@functools.lru_cache
def _is_arithmetic(text: str, *, guard: bool) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _plain(tree.body, guard=guard)


def _plain(
    node: ast.AST,
    *,
    guard: bool,
) -> bool:
    """Whether an expression consists of numbers, symbols, operators and the functions that torch
    writes.
    """
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call):
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    match node:
        case ast.Constant(value=str(text)):  # a Float
            return _NUMBER.fullmatch(text) is not None
        case ast.Constant(value=value):
            return isinstance(value, int | float | bool | None)
        case ast.Name(id=name):
            return name in _NAMES or _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
            if not (name.isidentifier() and name.isascii()):
                return False
            parts = [keyword.value for keyword in node.keywords]
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if guard and name in _METHODS:
            parts = [owner, *parts]
        case ast.Subscript(value=owner, slice=ast.Constant(value=str())) if guard:
            parts = [owner]
        case ast.Subscript(value=owner, slice=key) if guard:
            parts = [owner, key]
        case _:
            if not isinstance(node, _OPERATIONS):
                return False
    return all(_plain(part, guard=guard) for part in parts)


def _runs(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return bool(data)  # torch reads an empty file as nothing
    return False
