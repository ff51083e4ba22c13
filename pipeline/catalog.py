"""Catalogs: the list of models to freeze, parsed by pydantic at the door; plain dataclasses go on from there. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from freezer.device_class import device_class
from freezer.errors import CatalogError, ColdpressError
from freezer.limits import Limits
from freezer.recipes import select
from freezer.sources import Source, module_file, parse_source
from freezer.spec import InputSpec, declared_spec
from freezer.store import NAME

LATER = ("preserve", "reset", "trust", "threads", "points", "filter")
"""Fields that the design names and this release does not support yet: refused by name, never passed over in silence."""

SAMPLE_SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model of a catalog.

    Attributes:
        name: of the model in the store and in MLflow.
        source: where it comes from.
        spec: of its inputs; None means: as the samples are.
        samples: file of real input sets.
        task_metric: `MODULE:FUNCTION`, see `freezer.judge.TaskMetric`.
        limits, device_classes, recipes: what was asked for; `auto` is resolved when the machines are known.
        files: what a python source reads besides its module; part of its key.
        search_path: folders in which python modules are looked for.
    """

    name: str
    source: Source
    spec: InputSpec | None
    samples: Path | None
    task_metric: str | None
    limits: Limits
    device_classes: tuple[str, ...]
    recipes: tuple[str, ...]
    files: tuple[Path, ...]
    search_path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """The good entries of a catalog, and what is wrong with the others."""

    path: Path
    entries: tuple[Entry, ...]
    problems: tuple[CatalogError, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Limits(_Strict):
    speedup_min: float | None = Field(default=None, gt=0)
    error_ratio_max: float | None = Field(default=None, gt=0)
    timeout_s: float | None = Field(default=None, gt=0)
    memory_gb: float | None = Field(default=None, gt=0)
    latency_ms_max: float | None = Field(default=None, gt=0)
    size_mb_max: float | None = Field(default=None, gt=0)


class _Entry(_Strict):
    name: str
    source: str
    args: dict[str, Any] = {}
    weights: Literal["random"] | None = None
    seed: int = 0
    inputs: dict[str, Any] | list[Any] | None = None
    dims: dict[str, Any] = {}
    samples: str | None = None
    files: list[str] = []
    task_metric: str | None = None
    limits: _Limits = _Limits()
    device_classes: list[str] = ["auto"]
    recipes: list[str] = ["auto"]

    @field_validator("name")
    @classmethod
    def _name_fits(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"got {name!r}, expected lower-case letters and digits, joined by single '.', '_' or '-'")
        return name


def read_catalog(path: Path, *, only: str | None = None) -> Catalog:
    """The entries of a YAML catalog.

    Args:
        path: of the file; paths in it are relative to its folder.
        only: a glob that the names of the entries must match.

    Raises:
        CatalogError: the file is not a catalog at all. What is wrong with single entries is in `problems`.
    """
    document = _parse(path)
    defaults = document.get("defaults") or {}
    models = document.get("models")
    if not isinstance(defaults, dict):
        raise CatalogError(f"{path}: got a {type(defaults).__name__}, expected a mapping of fields", field="defaults")
    if not isinstance(models, list) or not models:
        raise CatalogError(f"{path} lists no models; expected `models:` and at least one entry", field="models")
    entries: list[Entry] = []
    problems: list[CatalogError] = []
    seen: set[str] = set()
    for index, record in enumerate(models):
        name = record.get("name") if isinstance(record, dict) else None
        label = str(name) if name is not None else f"#{index + 1}"
        if only is not None and not fnmatch(label, only):
            continue
        try:
            if label in seen:
                raise CatalogError("the name is given twice; names must be unique", entry=label, field="name")
            seen.add(label)
            entries.append(_entry(record, defaults, label, path.parent.resolve()))
        except CatalogError as error:
            problems.append(error)
    if not entries and not problems:
        raise CatalogError(f"{path} has no entry that matches {only!r}", field="--only")
    return Catalog(path=path, entries=tuple(entries), problems=tuple(problems))


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CatalogError(f"{path} cannot be read: {error.strerror or error}; name a catalog file") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CatalogError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise CatalogError(f"{path}: got a {type(document).__name__}, expected a mapping with `models:`")
    for key in set(document) - {"defaults", "models"}:
        raise CatalogError(f"{path}: the field is unknown; expected defaults and models", field=str(key))
    return document


def _entry(record: Any, defaults: Mapping[str, Any], label: str, folder: Path) -> Entry:
    if not isinstance(record, dict):
        raise CatalogError(f"got a {type(record).__name__}, expected a mapping of fields", entry=label)
    for name in LATER:
        if name in record or name in defaults:
            raise CatalogError("this release does not support the field yet; remove it", entry=label, field=name)
    merged = {**defaults, **record}
    if isinstance(defaults.get("limits"), dict) and isinstance(record.get("limits"), dict):
        merged["limits"] = {**defaults["limits"], **record["limits"]}
    try:
        parsed = _Entry.model_validate(merged)
    except ValidationError as error:
        raise _as_catalog_error(error, label) from None
    return _Reader(parsed, label, folder).entry()


def _as_catalog_error(error: ValidationError, label: str) -> CatalogError:
    """The first thing that pydantic found wrong, and how many more there are."""
    first, *others = error.errors()
    field = ".".join(str(part) for part in first["loc"])
    got = "" if first["type"] in ("missing", "extra_forbidden") else f" (got {str(first['input'])[:80]!r})"
    message = {"missing": "the field is required", "extra_forbidden": "the field is unknown"}.get(first["type"], first["msg"])
    more = f"; and {len(others)} more in this entry" if others else ""
    return CatalogError(f"{message.removeprefix('Value error, ')}{got}{more}", entry=label, field=field)


class _Reader:
    """Turns one parsed entry into an Entry; every complaint names the entry and the field."""

    def __init__(self, parsed: _Entry, label: str, folder: Path) -> None:
        self._parsed, self._label, self._folder = parsed, label, folder
        self._search_path = tuple(dict.fromkeys((str(folder), str(Path.cwd()))))

    def entry(self) -> Entry:
        """The entry, checked as far as can be told without loading its model."""
        parsed = self._parsed
        limits = {name: value for name, value in parsed.limits.model_dump().items() if value is not None}
        return Entry(
            name=parsed.name,
            source=self._source(),
            spec=self._spec(),
            samples=self._samples(),
            task_metric=self._task_metric(),
            limits=Limits(**limits),
            device_classes=self._device_classes(),
            recipes=self._recipes(),
            files=tuple(self._files()),
            search_path=self._search_path,
        )

    def _fail(self, field: str, message: str) -> CatalogError:
        return CatalogError(message, entry=self._label, field=field)

    def _source(self) -> Source:
        parsed = self._parsed
        try:
            source = parse_source(
                parsed.source,
                folder=self._folder,
                args=parsed.args,
                weights=parsed.weights,
                seed=parsed.seed,
                search_path=self._search_path,
            )
        except ColdpressError as error:
            raise self._fail("source", str(error)) from None
        if source.kind == "python":
            self._check_module("source", source.location)
        return source

    def _check_module(self, field: str, location: str) -> None:
        module = location.partition(":")[0]
        if module_file(module, self._search_path) is None:
            looked = ", ".join(self._search_path)
            raise self._fail(field, f"module {module!r} is not found; looked in {looked} and on PYTHONPATH")

    def _spec(self) -> InputSpec | None:
        given = self._parsed.inputs
        if given is None:
            if self._parsed.samples is None:
                raise self._fail("inputs", "expected `inputs:` or `samples:`")
            if self._parsed.dims:
                raise self._fail("dims", "dims need `inputs:` whose shapes name them")
            return None
        try:
            return declared_spec(given, self._parsed.dims)
        except ColdpressError as error:
            raise self._fail("dims" if str(error).startswith("dim ") else "inputs", str(error)) from None

    def _samples(self) -> Path | None:
        if self._parsed.samples is None:
            return None
        path = (self._folder / self._parsed.samples).resolve()
        if path.suffix not in SAMPLE_SUFFIXES:
            raise self._fail("samples", f"got {path.name!r}, expected a file that ends in {' or '.join(SAMPLE_SUFFIXES)}")
        if not path.is_file():
            raise self._fail("samples", f"{path} is not there; paths are relative to the catalog's folder")
        return path

    def _task_metric(self) -> str | None:
        given = self._parsed.task_metric
        if given is None:
            return None
        kind, _, location = given.partition(":")
        if kind != "python" or location.count(":") != 1:
            raise self._fail("task_metric", f"got {given!r}, expected python:MODULE:FUNCTION")
        self._check_module("task_metric", location)
        return location

    def _device_classes(self) -> tuple[str, ...]:
        for name in self._parsed.device_classes:
            if name != "auto":
                try:
                    device_class(name)
                except ColdpressError as error:
                    raise self._fail("device_classes", str(error)) from None
        return tuple(self._parsed.device_classes)

    def _recipes(self) -> tuple[str, ...]:
        try:
            select(self._parsed.recipes, portable=False)
        except ColdpressError as error:
            raise self._fail("recipes", str(error)) from None
        return tuple(self._parsed.recipes)

    def _files(self) -> Iterator[Path]:
        for pattern in self._parsed.files:
            found: Sequence[str] = sorted(glob.glob(str(self._folder / pattern), recursive=True))
            if not found:
                raise self._fail("files", f"{pattern!r} matches nothing in {self._folder}")
            yield from (Path(path).resolve() for path in found if Path(path).is_file())
