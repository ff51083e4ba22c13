"""What is wrong with fields of a catalog entry, in words. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pydantic_core import ErrorDetails

from freezer.errors import ColdpressError, SpecError, expected_names
from freezer.freezing.sources import module_file

ENTRY = "CP-ENTRY"
"""Error code of a bad field; the error names the field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldProblem:
    """What is wrong with a field.

    Attributes:
        field: name of the field, dotted for a part of it; empty for the field that is checked.
        message: what was given and what was expected.
    """

    field: str
    message: str
    code: str = ENTRY


class ProblemsError(ValueError):
    """The problems of one field, and of fields that are checked with it."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


@contextmanager
def field_errors() -> Iterator[None]:
    """Turn an error of the library into a problem of the field that is checked."""
    try:
        yield
    except ColdpressError as error:
        code = error.code if error.code == "CP-TRUST" else ENTRY
        raise ProblemsError(FieldProblem(field="", message=str(error), code=code)) from None


@contextmanager
def collected(problems: list[FieldProblem], field: str) -> Iterator[None]:
    """Add an error of a part of a field to the problems."""
    try:
        yield
    except SpecError as error:
        problems.append(FieldProblem(field=field, message=str(error)))


_EXPECTED = {
    "string_type": "a text; put it in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list: [...]",
    "dict_type": "a mapping: {...}",
    "finite_number": "a finite number",
    "too_short": "at least one; remove the field to use the default",
    "string_pattern_mismatch": "64 hexadecimal digits in lower case, as sha256sum prints them",
}
_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


def field_problems(details: ErrorDetails, names: Collection[str]) -> list[FieldProblem]:
    """Return the problems in an error of pydantic, each with its field in dotted form.

    Args:
        details: the error.
        names: the names of all fields, of which the closest to an unknown one is suggested.
    """
    field = ".".join(str(part) for part in details["loc"] if part != "[key]")
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ProblemsError):
        return [replace(problem, field=problem.field or field) for problem in cause.problems]
    message = str(cause) if cause else _in_words(details, names)
    return [FieldProblem(field=field, message=message)]


def _in_words(details: ErrorDetails, names: Collection[str]) -> str:
    kind = details["type"]
    context = details.get("ctx", {})
    if kind == "missing":
        return "the field is required; add it"
    if kind == "extra_forbidden":
        expected = expected_names(str(details["loc"][-1]), names)
        return f"the field is unknown; {expected}"
    bounds = [f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context]
    expected = f"a number {' and '.join(bounds)}"
    if not bounds:
        expected = _EXPECTED.get(kind, str(context.get("expected", details["msg"])))
    return f"got {str(details['input'])[:80]!r}, expected {expected}"


def function_problem(location: str, search_path: Sequence[str]) -> str | None:
    """Why MODULE:FUNCTION cannot work; None if only running the module can show more.

    Args:
        location: the function, as `MODULE:FUNCTION`.
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
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name in functions or _may_bind(tree, name):
        return None
    return f"{file} has no such function; {expected_names(name, functions)}"


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
