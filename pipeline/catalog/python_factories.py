"""Check a `python:` function without running it: that it exists, takes the arguments, and returns a module."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

NO_MODULES = ("None", "str", "bytes", "int", "float", "bool", "dict", "list", "tuple", "set")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def problem_of(file: Path, name: str, args: Mapping[str, Any] | None, *, gives_module: bool) -> str | None:
    """Return why a function cannot work for an entry; None if it may, or if only running the module can show.

    Args:
        file: of the module.
        name: of the function.
        args: keyword arguments of the call; None if unknown.
        gives_module: whether it must return an nn.Module.
    """
    if file.suffix != ".py":
        return None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {error.msg}; fix the module"
    except (OSError, ValueError, RecursionError) as error:
        return f"{file} cannot be read: {error}"
    names = list(_bound_names(tree.body))
    if name not in names:
        if "*" in names or "__getattr__" in names:
            return None
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(set(names))[:12]) or 'nothing'}"
        return f"{file} has no function {name!r}; {hint}"
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    if not found or found[-1].decorator_list:
        return None  # a class, an import, or a decorated function
    function = found[-1]
    place = f"{file}:{function.lineno}: {name}"
    if isinstance(function, ast.AsyncFunctionDef):
        return f"{place} is async; expected a plain function"
    if args is not None:
        refused = _refused_arguments(function, args)
        if refused is not None:
            return f"{place} {refused}"
    nothing = _returns_no_module(function) if gives_module else None
    return f"{place} {nothing}, expected an nn.Module; return the model" if nothing else None


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module binds at its top level, also in branches; `*` for a star import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _bound_names(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound_names(handler.body)


def _refused_arguments(function: ast.FunctionDef, args: Mapping[str, Any]) -> str | None:
    given = function.args
    names = [item.arg for item in (*given.args, *given.kwonlyargs)]
    if given.kwarg is None:
        for name in args:
            if name not in names:
                return f"takes no argument {name!r}; it takes {', '.join(names) or 'none'}"
    positional = [item.arg for item in (*given.posonlyargs, *given.args)]
    required = positional[: len(positional) - len(given.defaults)]
    required += [item.arg for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    missing = [name for name in required if name not in args]
    return f"needs the argument {missing[0]!r}; add it to `args:`" if missing else None


def _returns_no_module(function: ast.FunctionDef) -> str | None:
    """Return what a function returns if that is certainly not a module: by its annotation, or because it returns only literals."""
    annotation = function.returns
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return "returns None"
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    if isinstance(base, ast.Name) and base.id in NO_MODULES:
        return f"returns a {base.id}"
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return "is a generator"
    returns = [node.value for node in own if isinstance(node, ast.Return)]
    if not returns:
        ends_otherwise = annotation is not None or any(isinstance(node, ast.Raise | ast.While) for node in own)
        return None if ends_otherwise else "returns nothing"
    literals = (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.JoinedStr)
    if all(value is None or isinstance(value, literals) for value in returns):
        return "returns nothing but literals"
    return None


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without nested functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
