"""The fields of a catalog entry, checked by pydantic as far as possible without loading the model.

A check that fails raises ValueError, which becomes a problem of its field. Imports no torch.
"""

from __future__ import annotations

import glob
import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationInfo
from pydantic_core import PydanticCustomError

from freezer.codec import Json, frozen
from freezer.errors import SpecError
from freezer.files import file_name, is_url
from freezer.freezing.choices import check_consented, check_used, select
from freezer.freezing.sources import Source, parse_source
from freezer.hardware import device_class
from freezer.spec import (
    Accuracy,
    InputSpec,
    Limits,
    Objective,
    Point,
    Precision,
    check_consent,
    declared_accuracy,
    declared_dim,
    declared_item,
    declared_spec,
    limit_problem,
    match_headers,
    of_inputs,
    read_header,
)
from pipeline.catalog.field_problems import (
    DOTTED,
    FUNCTION,
    IDENTIFIER,
    SHA256,
    SLUG,
    FieldError,
    check_function,
    field_errors,
)

SAMPLE_SUFFIXES = (".safetensors", ".npz")

KNOWS_ITS_INPUTS = ("export", "mlflow", "transformers")
"""Kinds of sources whose inputs are known, so that an entry need not declare them."""

REGISTRY = "mlflow:"

SOURCE_SETTINGS = ("args", "weights", "seed", "method", "sha256", "trust")
"""Fields that become attributes of the source."""


@frozen
class Folders:
    """Context of a validation: base of relative paths, and folders with Python modules."""

    base: Path
    search_path: tuple[str, ...]


def _folders(info: ValidationInfo) -> Folders:
    assert isinstance(info.context, Folders)
    return info.context


@field_errors()
def _read_source(text: str, info: ValidationInfo) -> Source:
    folders = _folders(info)
    settings = {name: info.data[name] for name in SOURCE_SETTINGS if name in info.data}
    settings["search_path"] = folders.search_path
    if text.startswith(REGISTRY):
        location = text.removeprefix(REGISTRY)
        if not re.fullmatch(r"models:/[^/@]+(@[\w-]+|/\d+|/latest)?", location):
            raise ValueError(
                f"got {text!r}, expected mlflow:models:/NAME@ALIAS or mlflow:models:/NAME/VERSION"
            )
        return Source(kind="mlflow", location=location, **settings)
    source = parse_source(text, folder=folders.base, **settings)
    if source.kind == "python":
        check_function(source.location, folders.search_path)
    return source


def _check_args(args: Json) -> Json:
    """Reject dates, bytes and sets, which YAML has and JSON, the form of keys, lacks."""
    try:
        json.dumps(args, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"{error}; expected values of JSON, so put a date in quotes") from None
    return args


def _read_spec(given: object, info: ValidationInfo) -> InputSpec | None:
    dims = info.data.get("dims", {})
    if given is None:
        if dims:
            raise FieldError("dims need `inputs:` whose shapes name them", field="dims")
        return None
    if not isinstance(given, dict | list):
        raise FieldError(f"got {given!r:.80}, expected a mapping: {{...}}, or a list: [...]")
    for name, bound in dims.items():
        with field_errors(f"dims.{name}"):
            declared_dim(name, bound)
    positional = isinstance(given, list)
    for key, item in enumerate(given) if isinstance(given, list) else given.items():
        with field_errors(f"inputs.{key}"):
            declared_item(f"input_{key}" if positional else str(key), item, positional=positional)
    try:
        return declared_spec(given, dims)
    except SpecError as error:
        field = "dims" if str(error).startswith("dim ") else "inputs"
        raise FieldError(str(error), field=field) from None


def _lacks_inputs(info: ValidationInfo) -> bool:
    """Whether neither the entry nor the source declares inputs; False if one of them is bad."""
    source = info.data.get("source")
    if "inputs" not in info.data or source is None:
        return False
    return info.data["inputs"] is None and source.kind not in KNOWS_ITS_INPUTS


@field_errors()
def _find_samples(given: str | None, info: ValidationInfo) -> Path | str | None:
    if given is None:
        if _lacks_inputs(info):
            raise FieldError(
                "got neither `inputs:` nor `samples:`; write `inputs: {x: {shape: [1, 8]}}`",
                field="inputs",
            )
        return None
    path = _sample_file(given, info)
    spec = info.data.get("inputs")
    if isinstance(path, Path):
        sets = read_header(path)
        if spec is not None:
            match_headers(sets, spec)
    return path


def _sample_file(given: str, info: ValidationInfo) -> Path | str:
    """The file of samples, or its URL."""
    name = file_name(given) if is_url(given) else given
    if not name.endswith(SAMPLE_SUFFIXES):
        suffixes = " or ".join(SAMPLE_SUFFIXES)
        raise ValueError(f"got {name!r}, expected a file that ends in {suffixes}")
    if is_url(given):
        return given
    path: Path = (_folders(info).base / given).resolve()
    if not path.is_file():
        raise ValueError(f"{path} does not exist; paths are relative to the catalog")
    return path


@field_errors()
def _read_accuracy(given: Json | None, info: ValidationInfo) -> Accuracy | None:
    accuracy = None if given is None else declared_accuracy(given)
    if "precision" in info.data:
        check_consent(info.data["precision"], accuracy)
        recipes = info.data.get("recipes", ("auto",))
        check_consented(recipes, info.data["precision"])
        check_used(recipes, info.data["precision"])
    if accuracy is None or accuracy.samples is None:
        return accuracy
    if accuracy.metric is not None:
        check_function(accuracy.metric, _folders(info).search_path)
    samples = _sample_file(str(accuracy.samples), info)
    spec = info.data.get("inputs")
    if isinstance(samples, Path) and spec is not None:
        match_headers([of_inputs(headers, spec) for headers in read_header(samples)], spec)
    return replace(accuracy, samples=samples)


def _find_files(pattern: str, info: ValidationInfo) -> list[Path]:
    folder = _folders(info).base
    paths = [Path(path) for path in sorted(glob.glob(str(folder / pattern), recursive=True))]
    if not paths:
        raise ValueError(f"{pattern!r} matches nothing in {folder}; write a path or a glob")
    return [path.resolve() for path in paths if path.is_file()]


def _joined(files: tuple[list[Path], ...]) -> tuple[Path, ...]:
    return tuple(chain.from_iterable(files))


def _read_task_metric(given: str, info: ValidationInfo) -> str:
    location = given.removeprefix("python:")
    check_function(location, _folders(info).search_path)
    return location


def _read_limits(given: Json) -> Limits:
    limits: Json = {}
    for name, value in given.items():
        problem = limit_problem(name, value)
        if problem is not None:
            raise FieldError(problem, field=f"limits.{name}")
        if value is not None:
            limits[name] = value if name == "nan" else float(value)
    return Limits(**limits)


@field_errors()
def _check_device_class(name: str) -> str:
    if name != "auto":
        device_class(name)
    return name


@field_errors()
def _check_recipe(name: str) -> str:
    select([name], portable=False)
    return name


def _check_threads(given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given and len(set(given)) < len(given):
        raise ValueError(f"got {list(given)}, expected each count once; the first decides")
    return given or ()


@field_errors()
def _check_points(given: tuple[Point, ...] | None, info: ValidationInfo) -> tuple[Point, ...]:
    """Check the points. Those of dims that the source declares are checked when it is loaded."""
    spec = info.data.get("inputs")
    if given and (spec is not None or _lacks_inputs(info)):
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


class EntryModel(BaseModel):
    """The fields of an entry, as a catalog gives them; validation replaces them by the values of
    Entry.

    A check reads the fields above its own.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        validate_default=True,
    )

    name: str = Field(pattern=SLUG)
    args: Annotated[Json, AfterValidator(_check_args)] = {}
    weights: Literal["random"] | None = None
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
    )
    method: str | None = None
    sha256: str | None = Field(default=None, pattern=SHA256)
    trust: bool = False
    source: Annotated[str, AfterValidator(_read_source)]
    dims: Json = {}
    inputs: Annotated[Any, AfterValidator(_read_spec)] = None
    samples: Annotated[str | None, AfterValidator(_find_samples)] = None
    files: Annotated[
        _List[Annotated[str, AfterValidator(_find_files)]], AfterValidator(_joined)
    ] = ()
    task_metric: (
        Annotated[str, Field(pattern=FUNCTION), AfterValidator(_read_task_metric)] | None
    ) = None
    limits: Annotated[Json, AfterValidator(_read_limits)] = {}
    objective: Objective = "p50"
    device_classes: _NonEmpty[Annotated[str, AfterValidator(_check_device_class)]] = ("auto",)
    recipes: _NonEmpty[Annotated[str, AfterValidator(_check_recipe)]] = ("auto",)
    precision: _List[Precision] = ()
    accuracy: Annotated[Json | None, AfterValidator(_read_accuracy)] = None
    tags: dict[str, str] = {}
    preserve: _List[Annotated[str, Field(pattern=DOTTED)]] = ()
    reset: str | None = Field(default=None, pattern=IDENTIFIER)
    threads: Annotated[_NonEmpty[_Count] | None, AfterValidator(_check_threads)] = None
    points: Annotated[_NonEmpty[dict[str, _Count]] | None, AfterValidator(_check_points)] = None
