"""Read the list of models to freeze from a file or an MLflow registry. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from pydantic import ValidationError

from freezer.errors import CatalogError
from pipeline.catalog.entry import Entry, of_version
from pipeline.catalog.files import Record, read_file
from pipeline.catalog.schema import REGISTRY, SOURCE_SETTINGS, EntryModel, Folders, coded_problems


@dataclass(frozen=True, kw_only=True, slots=True)
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
        super().__init__(
            f"{count}; fix them, or run the others with --keep-going", code="CP-CATALOG-ENTRIES"
        )
        self.problems = tuple(problems)


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
    return _read_records(read_file(path), folder=path.parent.resolve(), origin=str(path), only=only)


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
            " mlflow:@ALIAS, or a catalog file",
            code="CP-CATALOG-KIND",
        )
    models = {
        slug(model.name): model
        for model in list_registry(tracking_uri, filter_string, alias[1:] or None)
    }
    if not models:
        which = (f" with the alias {alias[1:]!r}" if alias else "") + (
            f" that match {filter_string!r}" if filter_string else ""
        )
        raise CatalogError(
            f"the registry has no models{which} to freeze; check --tracking-uri, the alias and"
            " --filter",
            code="CP-CATALOG-EMPTY",
        )
    records = [
        Record(
            place=model.model_uri,
            value={"name": name, "source": f"{REGISTRY}{model.model_uri}", "trust": trust},
        )
        for name, model in models.items()
    ]
    read = _read_records(records, folder=Path.cwd(), origin=catalog, only=only)
    entries = [
        replace(
            of_version(entry, models[entry.name]),
            registered_name=f"{models[entry.name].name}-frozen",
        )
        for entry in read.entries
    ]
    return Catalog(entries=tuple(entries), problems=read.problems)


def _read_records(
    records: Iterable[Record], *, folder: Path, origin: str, only: Sequence[str]
) -> Catalog:
    """Turn records into entries; see `read_catalog`.

    Args:
        records: in order.
        folder: base of relative paths.
        origin: of the records, for errors.
        only: globs over entry names; empty takes every entry.

    Raises:
        CatalogError: no entry matches `only`.
    """
    entries: list[Entry] = []
    problems: list[CatalogError] = []
    seen: dict[str, str] = {}
    for index, record in enumerate(records):
        name = record.value.get("name") if isinstance(record.value, dict) else None
        label = str(name) if name is not None else f"#{index + 1}"
        if only and not any(fnmatch(label, glob) for glob in only):
            continue
        if label in seen:
            problems.append(
                _problem(
                    record,
                    label,
                    "name",
                    f"the name is already used at {seen[label]}; names must be unique",
                    "CP-ENTRY-NAME",
                )
            )
            continue
        seen[label] = record.place
        try:
            entries.append(_read_entry(record, label, folder))
        except BadEntriesError as error:
            problems += error.problems
    if not entries and not problems:
        globs = " or ".join(map(repr, only))
        raise CatalogError(
            f"{origin} has no entry that matches {globs}", field="--only", code="CP-CATALOG-EMPTY"
        )
    return Catalog(entries=tuple(entries), problems=tuple(problems))


def _read_entry(record: Record, label: str, folder: Path) -> Entry:
    """Turn a record into an entry, checked as far as possible without loading its model.

    Args:
        record: its value should be a mapping of fields.
        label: name of the entry, or its number without a name.
        folder: base of relative paths.

    Raises:
        BadEntriesError: the entry is invalid.
    """
    if not isinstance(record.value, dict):
        got = "nothing" if record.value is None else f"a {type(record.value).__name__}"
        raise BadEntriesError(
            [
                _problem(
                    record, label, None, f"got {got}, expected a mapping of fields", "CP-ENTRY-FORM"
                )
            ]
        )
    folders = Folders(base=folder, search_path=tuple(dict.fromkeys((str(folder), str(Path.cwd())))))
    try:
        parsed = EntryModel.model_validate(record.value, context=folders)
    except ValidationError as error:
        found = [problem for details in error.errors() for problem in coded_problems(details)]
        raise BadEntriesError([_problem(record, label, *problem) for problem in found]) from None
    except OSError as error:
        raise BadEntriesError(
            [_problem(record, label, None, f"{type(error).__name__}: {error}", "CP-FETCH")]
        ) from error
    fields = {name: value for name, value in parsed if name not in (*SOURCE_SETTINGS, "dims")}
    registered_name = f"{parsed.name}-frozen" if fields["source"].kind == "mlflow" else None
    return Entry(
        spec=fields.pop("inputs"),
        search_path=folders.search_path,
        registered_name=registered_name,
        **fields,
    )


def _problem(
    record: Record, label: str, field: str | None, message: str, code: str
) -> CatalogError:
    return CatalogError(
        message, entry=label, field=field, place=record.place_of(field or ""), code=code
    )
