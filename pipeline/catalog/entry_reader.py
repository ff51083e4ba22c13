"""Turn one record of a catalog into an Entry, or reject it with the field, the value and the fix. Imports no torch."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from freezer.errors import CatalogError, ColdpressError
from freezer.files.download import file_name, is_url
from freezer.freezing.models.sources import Source, module_file, parse_source
from freezer.freezing.recipes.recipes import select
from freezer.hardware.device_classes import device_class
from freezer.limits import Limits
from freezer.spec.inputs import InputSpec
from freezer.spec.parse import declared_spec
from freezer.spec.sample_headers import match_headers, read_header
from freezer.store.store import NAME
from pipeline.catalog.entry import Entry
from pipeline.catalog.python_factories import problem_of
from pipeline.catalog.schema import EntryModel, as_catalog_error

SAMPLE_SUFFIXES = (".safetensors", ".npz")

KNOWS_ITS_INPUTS = ("export", "mlflow")
"""Kinds of sources that declare their inputs, so that an entry need not."""

REGISTRY = "mlflow:"

EntryCode = Literal[
    "CP-ENTRY-FORM",
    "CP-ENTRY-FIELD",
    "CP-ENTRY-NAME",
    "CP-ENTRY-SOURCE",
    "CP-ENTRY-INPUTS",
    "CP-ENTRY-DIMS",
    "CP-ENTRY-SAMPLES",
    "CP-ENTRY-LIMITS",
    "CP-ENTRY-CLASS",
    "CP-ENTRY-RECIPE",
    "CP-ENTRY-FILES",
    "CP-ENTRY-PRESERVE",
    "CP-ENTRY-THREADS",
    "CP-ENTRY-POINTS",
]


def read_entry(record: Any, defaults: Mapping[str, Any], *, label: str, place: str, folder: Path) -> Entry:
    """Turn a record of a catalog into an entry.

    Args:
        record: should be a mapping of fields.
        defaults: of the fields.
        label: name of the entry, or its number without a name.
        place: file and line, for errors.
        folder: base of relative paths.

    Raises:
        CatalogError: the entry is invalid.
    """
    if not isinstance(record, dict):
        got = "nothing" if record is None else f"a {type(record).__name__}"
        raise CatalogError(f"got {got}, expected a mapping of fields", entry=label, place=place, code="CP-ENTRY-FORM")
    merged = {**defaults, **record}
    if isinstance(defaults.get("limits"), dict) and isinstance(record.get("limits"), dict):
        merged["limits"] = {**defaults["limits"], **record["limits"]}
    try:
        parsed = EntryModel.model_validate(merged)
    except ValidationError as error:
        raise as_catalog_error(error, label, place) from None
    try:
        return _Reader(parsed, label, place, folder).entry()
    except OSError as error:
        raise CatalogError(f"{type(error).__name__}: {error}", entry=label, place=place, code="CP-FETCH") from error


class _Reader:
    """Checks the fields of one parsed entry."""

    def __init__(self, parsed: EntryModel, label: str, place: str, folder: Path) -> None:
        self._parsed, self._label, self._place, self._folder = parsed, label, place, folder
        self._search_path = tuple(dict.fromkeys((str(folder), str(Path.cwd()))))

    def entry(self) -> Entry:
        """Return the entry, checked as far as possible without loading its model."""
        parsed = self._parsed
        self._check_name()
        source = self._source()
        spec = self._spec(source)
        return Entry(
            name=parsed.name,
            source=source,
            spec=spec,
            samples=self._samples(spec),
            task_metric=self._task_metric(),
            limits=Limits(**{name: value for name, value in parsed.limits.model_dump().items() if value is not None}),
            device_classes=self._device_classes(),
            recipes=self._recipes(),
            files=tuple(self._files()),
            search_path=self._search_path,
            registered_name=f"{parsed.name}-frozen" if source.kind == "mlflow" else None,
            tags=parsed.tags,
            preserve=self._preserve(),
            reset=self._reset(),
            threads=self._threads(),
            points=self._points(spec, source),
        )

    def _fail(self, field: str, message: str, code: EntryCode) -> CatalogError:
        return CatalogError(message, entry=self._label, field=field, place=self._place, code=code)

    @contextmanager
    def _checked(self, field: str, code: EntryCode) -> Iterator[None]:
        """Turn an error of the library into one of a field."""
        try:
            yield
        except ColdpressError as error:
            raise self._fail(field, str(error), code) from None

    def _check_name(self) -> None:
        name = self._parsed.name
        if not NAME.fullmatch(name):
            suggested = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            raise self._fail(
                "name",
                f"got {name!r}, expected lower-case letters and digits, joined by single '.', '_' or '-'"
                + (f"; write {suggested!r}" if suggested else ""),
                "CP-ENTRY-NAME",
            )

    def _source(self) -> Source:
        parsed = self._parsed
        settings = {"seed": parsed.seed, "trust": parsed.trust, "search_path": self._search_path, "sha256": parsed.sha256}
        if parsed.source.startswith(REGISTRY):
            return self._registry_source(settings)
        try:
            source = parse_source(
                parsed.source, folder=self._folder, args=parsed.args, weights=parsed.weights, method=parsed.method, **settings
            )
        except ColdpressError as error:
            found = CatalogError(str(error), entry=self._label, field="source", place=self._place, code="CP-ENTRY-SOURCE")
            found.code = error.code if error.code == "CP-TRUST" else "CP-ENTRY-SOURCE"
            raise found from None
        if source.kind == "python":
            self._check_function("source", source.location, parsed.args, gives_module=True)
        return source

    def _registry_source(self, settings: Mapping[str, Any]) -> Source:
        location = self._parsed.source.removeprefix(REGISTRY)
        if not re.fullmatch(r"models:/[^/@]+(@[\w-]+|/\d+|/latest)?", location):
            raise self._fail(
                "source",
                f"got {self._parsed.source!r}, expected mlflow:models:/NAME@ALIAS or mlflow:models:/NAME/VERSION",
                "CP-ENTRY-SOURCE",
            )
        return Source(kind="mlflow", location=location, **settings)

    def _check_function(self, field: str, location: str, args: Mapping[str, Any] | None, *, gives_module: bool) -> None:
        module, _, function = location.partition(":")
        file = module_file(module, self._search_path)
        if file is None:
            looked = ", ".join(self._search_path)
            raise self._fail(field, f"module {module!r} is not found; looked in {looked} and on PYTHONPATH", "CP-ENTRY-SOURCE")
        problem = problem_of(file, function, args, gives_module=gives_module)
        if problem is not None:
            raise self._fail(field, problem, "CP-ENTRY-SOURCE")

    def _spec(self, source: Source) -> InputSpec | None:
        given = self._parsed.inputs
        if given is None:
            if self._parsed.samples is None and source.kind not in KNOWS_ITS_INPUTS:
                raise self._fail(
                    "inputs", "got neither `inputs:` nor `samples:`; write `inputs: {x: {shape: [1, 8]}}`", "CP-ENTRY-INPUTS"
                )
            if self._parsed.dims:
                raise self._fail("dims", "dims need `inputs:` whose shapes name them", "CP-ENTRY-DIMS")
            return None
        try:
            return declared_spec(given, self._parsed.dims)
        except ColdpressError as error:
            of_dims = str(error).startswith("dim ")
            raise self._fail(
                "dims" if of_dims else "inputs", str(error), "CP-ENTRY-DIMS" if of_dims else "CP-ENTRY-INPUTS"
            ) from None

    def _samples(self, spec: InputSpec | None) -> Path | str | None:
        given = self._parsed.samples
        if given is None:
            return None
        name = file_name(given) if is_url(given) else given
        if not name.endswith(SAMPLE_SUFFIXES):
            raise self._fail(
                "samples", f"got {name!r}, expected a file that ends in {' or '.join(SAMPLE_SUFFIXES)}", "CP-ENTRY-SAMPLES"
            )
        if is_url(given):
            return given
        path = (self._folder / given).resolve()
        if not path.is_file():
            raise self._fail("samples", f"{path} does not exist; paths are relative to the catalog", "CP-ENTRY-SAMPLES")
        with self._checked("samples", "CP-ENTRY-SAMPLES"):
            sets = read_header(path)
            if spec is not None:
                match_headers(sets, spec)
        return path

    def _task_metric(self) -> str | None:
        given = self._parsed.task_metric
        if given is None:
            return None
        kind, _, location = given.partition(":")
        if kind != "python" or location.count(":") != 1:
            raise self._fail("task_metric", f"got {given!r}, expected python:MODULE:FUNCTION", "CP-ENTRY-SOURCE")
        self._check_function("task_metric", location, None, gives_module=False)
        return location

    def _device_classes(self) -> tuple[str, ...]:
        with self._checked("device_classes", "CP-ENTRY-CLASS"):
            for name in self._parsed.device_classes:
                if name != "auto":
                    device_class(name)
        return tuple(self._parsed.device_classes)

    def _recipes(self) -> tuple[str, ...]:
        with self._checked("recipes", "CP-ENTRY-RECIPE"):
            select(self._parsed.recipes, portable=False)
        return tuple(self._parsed.recipes)

    def _preserve(self) -> tuple[str, ...]:
        for name in self._parsed.preserve:
            if not all(part.isidentifier() for part in name.split(".")):
                raise self._fail(
                    "preserve",
                    f"got {name!r}, expected an attribute or method, or one of a submodule: sub.attr",
                    "CP-ENTRY-PRESERVE",
                )
        return tuple(dict.fromkeys(self._parsed.preserve))

    def _reset(self) -> str | None:
        name = self._parsed.reset
        if name is not None and not name.isidentifier():
            raise self._fail("reset", f"got {name!r}, expected the name of a method that takes nothing", "CP-ENTRY-PRESERVE")
        return name

    def _threads(self) -> tuple[int, ...]:
        given = self._parsed.threads or []
        if len(set(given)) < len(given):
            raise self._fail("threads", f"got {given}, expected each count once; the first decides", "CP-ENTRY-THREADS")
        return tuple(given)

    def _points(self, spec: InputSpec | None, source: Source) -> tuple[Mapping[str, int], ...]:
        """Return the points. Those of dims that the source declares are checked when it is loaded."""
        given = self._parsed.points or []
        if given and (spec is not None or source.kind not in KNOWS_ITS_INPUTS):
            with self._checked("points", "CP-ENTRY-POINTS"):
                (spec or InputSpec(inputs=())).named_points(given)
        return tuple(given)

    def _files(self) -> Iterator[Path]:
        for pattern in self._parsed.files:
            found: Sequence[str] = sorted(glob.glob(str(self._folder / pattern), recursive=True))
            if not found:
                raise self._fail(
                    "files", f"{pattern!r} matches nothing in {self._folder}; write a path or a glob", "CP-ENTRY-FILES"
                )
            yield from (Path(path).resolve() for path in found if Path(path).is_file())
