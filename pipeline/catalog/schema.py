"""The fields of a catalog entry, checked by pydantic as far as possible without loading the model.

Imports no torch.
"""

from __future__ import annotations

import ast
import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from freezer.errors import ColdpressError, SpecError
from freezer.files import file_name, is_url
from freezer.freezing.recipes import select
from freezer.freezing.sources import Source, module_file, parse_source
from freezer.hardware import PORTABLE, device_class
from freezer.spec import (
    InputSpec,
    Limits,
    Objective,
    declared_dim,
    declared_item,
    declared_spec,
    limit_problem,
    match_headers,
    read_header,
)
from freezer.store import NAME

SAMPLE_SUFFIXES = (".safetensors", ".npz")

KNOWS_ITS_INPUTS = ("export", "mlflow")
"""Kinds of sources that declare their inputs, so that an entry need not."""

REGISTRY = "mlflow:"

SOURCE_SETTINGS = ("args", "weights", "seed", "method", "sha256", "trust")
"""Fields that become attributes of the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """Context of a validation: the base of relative paths, and where Python modules are
    searched.
    """

    base: Path
    search_path: tuple[str, ...]


def _folders(info: ValidationInfo) -> Folders:
    assert isinstance(info.context, Folders)
    return info.context


@contextmanager
def _as_field_error(code: str) -> Iterator[None]:
    """Turn an error of the library into one of the field."""
    try:
        yield
    except ColdpressError as error:
        raise PydanticCustomError(
            error.code if error.code == "CP-TRUST" else code, str(error)
        ) from None


@contextmanager
def _collected(problems: list[tuple[str, str, str]], field: str, code: str) -> Iterator[None]:
    """Add an error of a part of a field to the problems: field, message and code."""
    try:
        yield
    except SpecError as error:
        problems.append((field, str(error), code))


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        suggested = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        expected = "expected lower-case letters and digits, joined by single '.', '_' or '-'"
        raise PydanticCustomError(
            "CP-ENTRY-NAME",
            f"got {name!r}, {expected}" + (f"; write {suggested!r}" if suggested else ""),
        )
    return name


def _read_source(text: str, info: ValidationInfo) -> Source:
    folders = _folders(info)
    settings = {name: info.data[name] for name in SOURCE_SETTINGS if name in info.data} | {
        "search_path": folders.search_path
    }
    if text.startswith(REGISTRY):
        location = text.removeprefix(REGISTRY)
        if not re.fullmatch(r"models:/[^/@]+(@[\w-]+|/\d+|/latest)?", location):
            message = (
                f"got {text!r}, expected mlflow:models:/NAME@ALIAS or mlflow:models:/NAME/VERSION"
            )
            raise PydanticCustomError("CP-ENTRY-SOURCE", message)
        return Source(kind="mlflow", location=location, **settings)
    with _as_field_error("CP-ENTRY-SOURCE"):
        source = parse_source(text, folder=folders.base, **settings)
    if source.kind == "python":
        _check_function(source.location, source.args, folders)
    return source


def _read_spec(given: Any, info: ValidationInfo) -> InputSpec | None:
    dims = info.data.get("dims", {})
    if given is None:
        if dims:
            raise PydanticCustomError("CP-ENTRY-DIMS", "dims need `inputs:` whose shapes name them")
        return None
    if not isinstance(given, dict | list):
        raise PydanticCustomError(
            "CP-ENTRY-INPUTS", f"got {given!r:.80}, expected a mapping: {{...}}, or a list: [...]"
        )
    problems: list[tuple[str, str, str]] = []
    for name, bound in dims.items():
        with _collected(problems, f"dims.{name}", "CP-ENTRY-DIMS"):
            declared_dim(name, bound)
    for key, item in given.items() if isinstance(given, dict) else enumerate(given):
        name = str(key) if isinstance(given, dict) else f"input_{key}"
        with _collected(problems, f"inputs.{key}", "CP-ENTRY-INPUTS"):
            declared_item(name, item, positional=isinstance(given, list))
    if problems:
        raise PydanticCustomError("CP-ENTRY-INPUTS", "several problems", {"problems": problems})
    try:
        return declared_spec(given, dims)
    except ColdpressError as error:
        code = "CP-ENTRY-DIMS" if str(error).startswith("dim ") else "CP-ENTRY-INPUTS"
        raise PydanticCustomError(code, str(error)) from None


def _find_samples(given: str | None, info: ValidationInfo) -> Path | str | None:
    spec, source = info.data.get("inputs"), info.data.get("source")
    if given is None:
        if (
            "inputs" in info.data
            and spec is None
            and source is not None
            and source.kind not in KNOWS_ITS_INPUTS
        ):
            message = "got neither `inputs:` nor `samples:`; write `inputs: {x: {shape: [1, 8]}}`"
            raise PydanticCustomError("CP-ENTRY-INPUTS", message)
        return None
    name = file_name(given) if is_url(given) else given
    if not name.endswith(SAMPLE_SUFFIXES):
        message = f"got {name!r}, expected a file that ends in {' or '.join(SAMPLE_SUFFIXES)}"
        raise PydanticCustomError("CP-ENTRY-SAMPLES", message)
    if is_url(given):
        return given
    path: Path = (_folders(info).base / given).resolve()
    if not path.is_file():
        raise PydanticCustomError(
            "CP-ENTRY-SAMPLES", f"{path} does not exist; paths are relative to the catalog"
        )
    with _as_field_error("CP-ENTRY-SAMPLES"):
        sets = read_header(path)
        if spec is not None:
            match_headers(sets, spec)
    return path


def _find_files(pattern: str, info: ValidationInfo) -> list[Path]:
    folder = _folders(info).base
    found = sorted(glob.glob(str(folder / pattern), recursive=True))
    if not found:
        message = f"{pattern!r} matches nothing in {folder}; write a path or a glob"
        raise PydanticCustomError("CP-ENTRY-FILES", message)
    return [Path(path).resolve() for path in found if Path(path).is_file()]


def _joined(found: tuple[list[Path], ...]) -> tuple[Path, ...]:
    return tuple(path for paths in found for path in paths)


def _read_task_metric(given: str, info: ValidationInfo) -> str:
    kind, _, location = given.partition(":")
    if kind != "python" or location.count(":") != 1:
        raise PydanticCustomError(
            "CP-ENTRY-SOURCE", f"got {given!r}, expected python:MODULE:FUNCTION"
        )
    _check_function(location, None, _folders(info))
    return location


def _read_limits(given: dict[str, Any]) -> Limits:
    problems = [
        (f"limits.{name}", why, "CP-ENTRY-LIMITS")
        for name, value in given.items()
        if (why := limit_problem(name, value))
    ]
    if problems:
        raise PydanticCustomError("CP-ENTRY-LIMITS", "several problems", {"problems": problems})
    found: dict[str, Any] = {
        name: float(value) for name, value in given.items() if value is not None
    }
    return Limits(**found)


def _check_device_class(name: str) -> str:
    with _as_field_error("CP-ENTRY-CLASS"):
        if name != "auto":
            device_class(name)
    return name


def _check_priced_class(name: str) -> str:
    if name in ("auto", PORTABLE):
        raise PydanticCustomError(
            "CP-ENTRY-CLASS", f"got {name!r}, expected the class of a machine with a price"
        )
    return _check_device_class(name)


def _check_recipe(name: str) -> str:
    with _as_field_error("CP-ENTRY-RECIPE"):
        select([name], portable=False)
    return name


def _check_preserved(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        message = f"got {name!r}, expected an attribute or method, or one of a submodule: sub.attr"
        raise PydanticCustomError("CP-ENTRY-PRESERVE", message)
    return name


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _check_reset(name: str) -> str:
    if not name.isidentifier():
        raise PydanticCustomError(
            "CP-ENTRY-PRESERVE", f"got {name!r}, expected the name of a method that takes nothing"
        )
    return name


def _check_threads(given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given and len(set(given)) < len(given):
        raise PydanticCustomError(
            "CP-ENTRY-THREADS", f"got {list(given)}, expected each count once; the first decides"
        )
    return given or ()


def _check_points(
    given: tuple[Mapping[str, int], ...] | None, info: ValidationInfo
) -> tuple[Mapping[str, int], ...]:
    """Check the points. Those of dims that the source declares are checked when it is loaded."""
    spec, source = info.data.get("inputs"), info.data.get("source")
    if given and (
        spec is not None
        or ("inputs" in info.data and source is not None and source.kind not in KNOWS_ITS_INPUTS)
    ):
        with _as_field_error("CP-ENTRY-POINTS"):
            (spec or InputSpec(inputs=())).named_points(given)
    return given or ()


_Item = TypeVar("_Item")


def _check_not_empty(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Reject an empty list. min_length of pydantic would count the valid items only."""
    if not items:
        raise PydanticCustomError("too_short", "empty")
    return items


_List = Annotated[tuple[_Item, ...], Strict(False)]
_NonEmpty = Annotated[_List[_Item], AfterValidator(_check_not_empty)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True)


class EntryModel(_Strict):
    """The fields of an entry, as a catalog gives them; validation replaces them by the values of
    Entry.

    A check reads the fields above its own.
    """

    name: Annotated[str, AfterValidator(_check_name)]
    args: dict[str, Any] = {}
    weights: Literal["random"] | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    method: str | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    trust: bool = False
    source: Annotated[str, AfterValidator(_read_source)]
    dims: dict[str, Any] = {}
    inputs: Annotated[Any, AfterValidator(_read_spec)] = None
    samples: Annotated[str | None, AfterValidator(_find_samples)] = None
    files: Annotated[
        _List[Annotated[str, AfterValidator(_find_files)]], AfterValidator(_joined)
    ] = ()
    task_metric: Annotated[str, AfterValidator(_read_task_metric)] | None = None
    limits: Annotated[dict[str, Any], AfterValidator(_read_limits)] = {}
    objective: Objective = "p50"
    price_per_hour: dict[
        Annotated[str, AfterValidator(_check_priced_class)],
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
    ] = {}
    device_classes: _NonEmpty[Annotated[str, AfterValidator(_check_device_class)]] = ("auto",)
    recipes: _NonEmpty[Annotated[str, AfterValidator(_check_recipe)]] = ("auto",)
    tags: dict[str, str] = {}
    preserve: Annotated[
        _List[Annotated[str, AfterValidator(_check_preserved)]], AfterValidator(_unique)
    ] = ()
    reset: Annotated[str, AfterValidator(_check_reset)] | None = None
    threads: Annotated[_NonEmpty[_Count] | None, AfterValidator(_check_threads)] = None
    points: Annotated[_NonEmpty[dict[str, _Count]] | None, AfterValidator(_check_points)] = None


# Errors


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
_FIELDS = {"CP-ENTRY-DIMS": "dims", "CP-ENTRY-INPUTS": "inputs"}
"""Fields of errors that are found while another field is checked."""


def coded_problems(problem: ErrorDetails) -> list[tuple[str, str, str]]:
    """Return the field in dotted form, the message and the code of each problem in an error of
    EntryModel.
    """
    location, kind = [str(part) for part in problem["loc"] if part != "[key]"], problem["type"]
    if several := problem.get("ctx", {}).get("problems"):
        return list(several)
    if kind.startswith("CP-"):
        return [(_FIELDS.get(kind, ".".join(location)), problem["msg"], kind)]
    code = "CP-ENTRY-LIMITS" if location[0] == "limits" else "CP-ENTRY-FIELD"
    return [(".".join(location), _in_words(problem), code)]


def _in_words(problem: ErrorDetails) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "missing":
        return "the field is required; add it"
    if kind == "extra_forbidden":
        close = get_close_matches(str(problem["loc"][-1]), EntryModel.model_fields, n=1)
        return "the field is unknown; " + (
            f"did you mean {close[0]!r}?"
            if close
            else f"expected one of {', '.join(EntryModel.model_fields)}"
        )
    bounds = [f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context]
    expected = (
        f"a number {' and '.join(bounds)}"
        if bounds
        else str(context.get("expected", problem["msg"]))
    )
    return f"got {str(problem['input'])[:80]!r}, expected {_EXPECTED.get(kind, expected)}"


# `python:` functions, which are checked without running them: they exist and take the arguments


def _check_function(location: str, args: Mapping[str, Any] | None, folders: Folders) -> None:
    """Reject MODULE:FUNCTION if it cannot work; only running the module can show the rest.

    Args:
        location: of the function.
        args: keyword arguments of the call; None if unknown.
        folders: to search.
    """
    module, _, function = location.partition(":")
    file = module_file(module, folders.search_path)
    if file is None:
        looked = ", ".join(folders.search_path)
        message: str | None = (
            f"module {module!r} is not found; looked in {looked} and on PYTHONPATH"
        )
    else:
        message = _problem_of(file, function, args) if file.suffix == ".py" else None
    if message is not None:
        raise PydanticCustomError("CP-ENTRY-SOURCE", message)


def _problem_of(file: Path, name: str, args: Mapping[str, Any] | None) -> str | None:
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {error.msg}; fix the module"
    except (OSError, ValueError, RecursionError) as error:
        return f"{file} cannot be read: {error}"
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        if not _may_bind(tree, name):
            close = get_close_matches(name, functions, n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"it has {', '.join(list(functions)[:12]) or 'none'}"
            )
            return f"{file} has no function {name!r}; {hint}"
    elif args is not None and not functions[name].decorator_list:
        refused = _refused_arguments(functions[name].args, args)
        return f"{file}:{functions[name].lineno}: {name} {refused}" if refused else None
    return None


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Whether a module may have an attribute that is not a plain function: a class, an import, a
    variable or a computed one.
    """
    nodes = list(ast.walk(tree))
    bound = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return not bound.isdisjoint((name, "*", "__getattr__"))


def _refused_arguments(takes: ast.arguments, args: Mapping[str, Any]) -> str | None:
    names = [item.arg for item in (*takes.args, *takes.kwonlyargs)]
    unknown = [name for name in args if name not in names]
    if unknown and takes.kwarg is None:
        return f"takes no argument {unknown[0]!r}; it takes {', '.join(names) or 'none'}"
    positional = [item.arg for item in (*takes.posonlyargs, *takes.args)]
    required = positional[: len(positional) - len(takes.defaults)]
    required += [
        item.arg
        for item, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        if default is None
    ]
    missing = [name for name in required if name not in args]
    return f"needs the argument {missing[0]!r}; add it to `args:`" if missing else None
