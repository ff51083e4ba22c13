"""What is wrong with fields of a catalog entry, in words. Imports no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from pydantic_core import ErrorDetails

from freezer.errors import ColdpressError, expected_names
from freezer.freezing.sources import module_file

ENTRY = "CP-ENTRY"
"""Error code of a bad field; the error names the field."""


class FieldError(ValueError):
    """What is wrong with a field.

    Args:
        message: what was given and what was expected.
        field: name of the field, dotted for a part of it; empty for the field that is checked.
        code: of the error.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        code: str = ENTRY,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@contextmanager
def field_errors(field: str = "") -> Iterator[None]:
    """Turn an error of the library or a file into one of a field; also a decorator."""
    try:
        yield
    except ColdpressError as error:
        code = error.code if error.code == "CP-TRUST" else ENTRY
        raise FieldError(str(error), field=field, code=code) from None
    except OSError as error:
        raise FieldError(str(error), field=field) from None


IDENTIFIER = r"^[^\W\d]\w*$"
DOTTED = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"
FUNCTION = "^python:[^:]+:[^:]+$"
SHA256 = "^[0-9a-f]{64}$"
SLUG = "^[a-z0-9]+([._-][a-z0-9]+)*$"

_EXPECTED = {
    "string_type": "a text; put it in quotes",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list: [...]",
    "dict_type": "a mapping: {...}",
    "model_type": "a mapping of fields",
    "too_short": "at least one; remove the field to use the default",
    IDENTIFIER: "the name of a method that takes nothing",
    DOTTED: "an attribute or method, or one of a submodule: sub.attr",
    FUNCTION: "python:MODULE:FUNCTION",
    SHA256: "64 hexadecimal digits in lower case, as sha256sum prints them",
    SLUG: "lower-case letters and digits, joined by single '.', '_' or '-'",
}
"""What is expected, by pattern or by pydantic's type of the error."""

_BOUNDS = {"ge": "of at least", "lt": "below"}


def field_error(details: ErrorDetails, names: Collection[str]) -> FieldError:
    """Return an error of pydantic with its field in dotted form.

    Args:
        details: the error.
        names: the names of all fields, of which the closest to an unknown one is suggested.
    """
    field = ".".join(str(part) for part in details["loc"] if part != "[key]")
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return FieldError(str(cause), field=cause.field or field, code=cause.code)
    return FieldError(str(cause) if cause else _in_words(details, names), field=field)


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
        fallback = str(context.get("expected", details["msg"]))
        expected = _EXPECTED.get(context.get("pattern", kind), fallback)
    return f"got {str(details['input'])[:80]!r}, expected {expected}"


def check_function(location: str, search_path: Sequence[str]) -> None:
    """Check a function as far as possible without running its module.

    Args:
        location: the function, as `MODULE:FUNCTION`.
        search_path: folders to search besides PYTHONPATH.

    Raises:
        FieldError: it cannot work.
    """
    module, _, name = location.partition(":")
    file = module_file(module, search_path)
    if file is None:
        folders = ", ".join(search_path)
        raise FieldError(f"module {module!r} is not found; looked in {folders} and on PYTHONPATH")
    if file.suffix != ".py":
        return
    try:
        text = file.read_text()
        tree = ast.parse(text)
    except SyntaxError as error:
        raise FieldError(f"{file}:{error.lineno}: {error.msg}; fix the module") from None
    except (OSError, ValueError) as error:
        raise FieldError(f"{file} cannot be read: {error}") from None
    if name not in re.findall(r"\w+", text) and not re.search(r"import \*|__getattr__", text):
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise FieldError(f"{file} has no such function; {expected_names(name, functions)}")
