"""Read the list of models to freeze from a file or an MLflow registry. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from freezer.codec import frozen
from freezer.errors import CatalogError
from freezer.freezing.sources import Source
from freezer.spec import Accuracy, InputSpec, Limits, Objective, Point, Precision
from pipeline.catalog.entry_fields import REGISTRY, SOURCE_SETTINGS, EntryModel, Folders
from pipeline.catalog.field_problems import FieldError, field_error
from pipeline.catalog.files import EMPTY, CatalogEntry, Record, as_file, read_file

if TYPE_CHECKING:
    from pipeline.tracking import RegistryModel

SOURCE_VERSION = "coldpress.source_version"
"""Tag: the version of the registry model of a source."""

SOURCE_RUN = "coldpress.source_run"
"""Tag: the run that logged a registry version.

A recreated registry counts its versions from 1 again.
"""


@frozen
class Entry:
    """One model of a catalog.

    Attributes:
        name: of the model in the store, and in MLflow unless `registered_name` is set.
        source: of the model.
        spec: of its inputs; None takes them from the samples or the source.
        samples: file with real input sets, or its URL.
        task_metric: `MODULE:FUNCTION`, see `freezer.freezing.judging.session.TaskMetric`.
        precision: lower precisions that are consented to, with the budget `accuracy`.
        objective: what the published candidate is best in, of those that meet the limits.
        limits, device_classes, recipes: as requested; `auto` is resolved once the nodes are known.
        files: read by a python source besides its module; part of its key.
        search_path: folders to search for python modules.
        registered_name: of the model in MLflow; None means `name`.
        tags: set on every run and version in MLflow.
        fill_up: whether to add generated input sets to the samples, which are one example.
        preserve: attributes and methods, also of submodules, that stay readable, settable and
            callable.
        reset: method that clears the state of a stateful model.
        threads: counts to build and judge for, the deciding one first; empty means `counts_within`
            the CPUs of the workers.
        points: sizes by dim name, the deciding one first; empty means the smallest size of every
            dim.
    """

    name: str
    source: Source
    spec: InputSpec | None
    samples: Path | str | None
    task_metric: str | None
    limits: Limits
    device_classes: tuple[str, ...]
    recipes: tuple[str, ...]
    files: tuple[Path, ...]
    search_path: tuple[str, ...]
    registered_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    fill_up: bool = False
    preserve: tuple[str, ...] = ()
    reset: str | None = None
    threads: tuple[int, ...] = ()
    points: tuple[Point, ...] = ()
    objective: Objective = "p50"
    precision: tuple[Precision, ...] = ()
    accuracy: Accuracy | None = None


def of_version(entry: Entry, model: RegistryModel) -> Entry:
    """Return an entry whose source is one version of a registry model."""
    tags = {**entry.tags, "coldpress.source_model": model.name, SOURCE_VERSION: model.version}
    if model.run_id:
        tags[SOURCE_RUN] = model.run_id
    return replace(entry, source=replace(entry.source, location=model.model_uri), tags=tags)


@frozen
class Catalog:
    """The good entries of a catalog, and the errors of the others."""

    entries: tuple[Entry, ...]
    problems: tuple[CatalogError, ...]


class BadEntriesError(CatalogError):
    """Entries of the catalog are bad, and nothing was started.

    `problems` holds all errors of each.
    """

    def __init__(self, problems: Sequence[CatalogError]) -> None:
        num_bad = len({problem.entry for problem in problems})
        count = "1 bad entry" if num_bad == 1 else f"{num_bad} bad entries"
        message = f"{count}; fix them, or run the others with --keep-going"
        super().__init__(message, code="CP-CATALOG-ENTRIES")
        self.problems = tuple(problems)
        for problem in problems:
            self.add_note(problem.coded)


def refuse_bad_entries(problems: Sequence[CatalogError], *, keep_going: bool) -> None:
    """Raise BadEntriesError if there are problems, unless the campaign runs the other entries."""
    if problems and not keep_going:
        raise BadEntriesError(problems)


def is_registry(catalog: str) -> bool:
    """Whether a catalog is a registry, `mlflow:` or `mlflow:@ALIAS`."""
    return catalog.startswith(REGISTRY)


def read_catalog(path: Path, *, only: Sequence[str] = ()) -> Catalog:
    """Read a catalog file.

    Args:
        path: of the file; paths in it are relative to its folder.
        only: globs over entry names; empty takes every entry.

    Raises:
        CatalogError: the file is not a catalog. Errors of single entries are in `problems`.
    """
    return _read_records(
        read_file(path),
        folder=path.parent.resolve(),
        origin=str(path),
        only=only,
    )


def read_entries(given: Sequence[CatalogEntry], *, only: Sequence[str] = ()) -> Catalog:
    """Read a catalog of Python objects, whose paths are relative to the working directory.

    Raises:
        CatalogError, UsageError: as `read_catalog`; a function cannot be imported by workers.
    """
    return _read_records(
        [Record(place=f"entry {index}", value=as_file(one)) for index, one in enumerate(given)],
        folder=Path.cwd(),
        origin="the catalog",
        only=only,
    )


def read_registry(
    catalog: str, tracking_uri: str, *, filter_string: str | None, trust: bool, only: Sequence[str]
) -> Catalog:
    """Read a registry: one entry for each registered model, its newest version or that of an alias.

    Args:
        catalog: `mlflow:` or `mlflow:@ALIAS`.
        tracking_uri: of MLflow.
        filter_string: as in MlflowClient.search_registered_models.
        trust: whether pickled models may be loaded.
        only: globs over entry names; empty takes every entry.

    Raises:
        CatalogError: no model matches, or MLflow rejects the filter.
        InfrastructureError: MLflow cannot be reached.
    """
    from pipeline.tracking import list_registry, slug

    alias = catalog.removeprefix(REGISTRY).strip("/")
    if alias and not alias.startswith("@"):
        raise CatalogError(
            f"got {catalog!r}, expected mlflow: for the newest version of every model,"
            " mlflow:@ALIAS, or a catalog file"
        )
    listed = list_registry(tracking_uri, filter_string, alias[1:] or None)
    models = {slug(model.name): model for model in listed}
    if not models:
        which = f" with the alias {alias[1:]!r}" if alias else ""
        which += f" that match {filter_string!r}" if filter_string else ""
        raise CatalogError(
            f"the registry has no models{which} to freeze; check --tracking-uri, the alias and"
            " --filter",
            code=EMPTY,
        )
    records = [
        Record(
            place=model.model_uri,
            value={"name": name, "source": f"{REGISTRY}{model.model_uri}", "trust": trust},
        )
        for name, model in models.items()
    ]
    read = _read_records(records, folder=Path.cwd(), origin=catalog, only=only)
    entries = []
    for entry in read.entries:
        model = models[entry.name]
        entries.append(replace(of_version(entry, model), registered_name=f"{model.name}-frozen"))
    return replace(read, entries=tuple(entries))


def _read_records(
    records: Iterable[Record], *, folder: Path, origin: str, only: Sequence[str]
) -> Catalog:
    """Turn records into entries.

    Args:
        records: the records, in order.
        folder: the base of relative paths.
        origin: where the records are from, for errors.
        only: globs over entry names; empty takes every entry.

    Raises:
        CatalogError: no entry matches `only`.
    """
    entries = []
    problems = []
    places: dict[str, str] = {}
    for number, record in enumerate(records, start=1):
        name = record.value.get("name") if isinstance(record.value, dict) else None
        label = f"#{number}" if name is None else str(name)
        if only and not any(fnmatch(label, glob) for glob in only):
            continue
        if label in places:
            message = f"the name is already used at {places[label]}; names must be unique"
            problems.append(_error(record, label, FieldError(message, field="name")))
            continue
        places[label] = record.place
        try:
            entries.append(_read_entry(record, folder))
        except ValidationError as error:
            for details in error.errors():
                problem = field_error(details, EntryModel.model_fields)
                problems.append(_error(record, label, problem))
    if not entries and not problems:
        globs = " or ".join(map(repr, only))
        message = f"{origin} has no entry" + (f" that matches {globs}" if only else "")
        raise CatalogError(message, field="--only", code=EMPTY)
    return Catalog(entries=tuple(entries), problems=tuple(problems))


def _read_entry(record: Record, folder: Path) -> Entry:
    """Turn a record into an entry, checked as far as possible without loading its model.

    Args:
        record: the record; its value should be a mapping of fields.
        folder: the base of relative paths.

    Raises:
        ValidationError: the entry is invalid.
    """
    search_path = tuple(dict.fromkeys((str(folder), str(Path.cwd()))))
    folders = Folders(base=folder, search_path=search_path)
    parsed = EntryModel.model_validate(record.value, context=folders)
    fields = {name: value for name, value in parsed if name not in (*SOURCE_SETTINGS, "dims")}
    return Entry(
        spec=fields.pop("inputs"),
        search_path=search_path,
        registered_name=f"{parsed.name}-frozen" if fields["source"].kind == "mlflow" else None,
        **fields,
    )


def _error(record: Record, label: str, problem: FieldError) -> CatalogError:
    return CatalogError(
        str(problem),
        entry=label,
        field=problem.field or None,
        place=record.place_of(problem.field),
        code=problem.code,
    )
