"""Check the function of a `python:` source without running its module. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path

from freezer.freezing.sources import module_file


def function_problem(
    location: str, args: Collection[str] | None, search_path: Sequence[str]
) -> str | None:
    """Why MODULE:FUNCTION cannot work; None if only running the module can show more.

    Args:
        location: the function, as `MODULE:FUNCTION`.
        args: names of the keyword arguments of the call; None if unknown.
        search_path: folders to search besides PYTHONPATH.
    """
    module, _, name = location.partition(":")
    file = module_file(module, search_path)
    if file is None:
        folders = ", ".join(search_path)
        return f"module {module!r} is not found; looked in {folders} and on PYTHONPATH"
    if file.suffix != ".py":
        return None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {error.msg}; fix the module"
    except (OSError, ValueError, RecursionError) as error:
        return f"{file} cannot be read: {error}"
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    function = functions.get(name)
    if function is None:
        return None if _may_bind(tree, name) else _unknown(file, name, list(functions))
    if args is None or function.decorator_list:
        return None
    problem = _argument_problem(function.args, args)
    return problem and f"{file}:{function.lineno}: {name} {problem}"


def _unknown(file: Path, name: str, functions: Sequence[str]) -> str:
    close = get_close_matches(name, functions, n=1)
    known = ", ".join(functions[:12]) or "none"
    hint = f"did you mean {close[0]!r}?" if close else f"it has {known}"
    return f"{file} has no function {name!r}; {hint}"


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Whether a module may have an attribute that is not a plain function: a class, an import, a
    variable or a computed one.
    """
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
    return not bound.isdisjoint((name, "*", "__getattr__"))


def _argument_problem(parameters: ast.arguments, args: Collection[str]) -> str | None:
    names = [parameter.arg for parameter in (*parameters.args, *parameters.kwonlyargs)]
    unknown = [name for name in args if name not in names]
    if unknown and parameters.kwarg is None:
        return f"takes no argument {unknown[0]!r}; it takes {', '.join(names) or 'none'}"
    positional = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
    required = positional[: len(positional) - len(parameters.defaults)]
    keyword_only = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    required += [parameter.arg for parameter, default in keyword_only if default is None]
    missing = [name for name in required if name not in args]
    return f"needs the argument {missing[0]!r}; add it to `args:`" if missing else None
