"""Read catalog files (YAML, JSON, JSON Lines) into plain records with their line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from freezer.errors import CatalogError, expected_names

EMPTY = "CP-CATALOG-EMPTY"
"""Error code of a catalog without entries."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One unchecked entry and its place; its YAML nodes, the entry's before that of the defaults,
    locate its fields.
    """

    place: str
    value: Any
    file: Path | None = None
    nodes: tuple[yaml.Node, ...] = ()

    def place_of(self, field: str) -> str:
        """Return the place of a field in dotted form, or of the innermost part of it that has a
        line of its own.
        """
        for node in self.nodes:
            found = _find(node, field.split("."))
            if found is not None and self.file is not None:
                return _place(found, self.file)
        return self.place


def read_file(path: Path) -> list[Record]:
    """Return the records of a catalog file, in order.

    Raises:
        CatalogError: the file is not a catalog.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CatalogError(
            f"{path}: got the suffix {path.suffix!r}, expected {', '.join(_READERS)}",
        )
    try:
        records = reader(path)
    except OSError as error:
        raise CatalogError(
            f"{path} cannot be read: {error.strerror}; name a catalog file"
        ) from error
    if not records:
        message = f"{path} lists no models; expected at least one entry"
        raise CatalogError(message, field="models", code=EMPTY)
    return records


def _read_yaml(path: Path) -> list[Record]:
    content = path.read_bytes()
    try:
        root = yaml.compose(content, Loader=_Loader)
        _refuse_duplicates(root, path)
        document = yaml.constructor.SafeConstructor().construct_document(root) if root else {}
    except CatalogError:
        raise
    except Exception as error:  # the constructor raises anything for `!!bool x` and the like
        raise CatalogError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        got = type(document).__name__
        raise CatalogError(f"{path}: got a {got}, expected a mapping with `models:`")
    for key in document.keys() - {"defaults", "models"}:
        expected = expected_names(str(key), ("defaults", "models"))
        raise CatalogError(f"{path}: the field is unknown; {expected}", field=str(key))
    defaults: dict[str, Any] = document.get("defaults") or {}
    models: list[Any] = document.get("models") or []
    for name, value, kind in (("defaults", defaults, dict), ("models", models, list)):
        if not isinstance(value, kind):
            message = f"{path}: got a {type(value).__name__}, expected a {kind.__name__}"
            raise CatalogError(message, field=name)
    if root is None or not models:
        return []
    nodes = {key.value: value for key, value in root.value}
    shared = (nodes["defaults"],) if defaults else ()
    records = []
    for node, value in zip(nodes["models"].value, models, strict=True):
        merged = _merged(defaults, value) if isinstance(value, dict) else value
        place = _place(node, path)
        records.append(Record(place=place, value=merged, file=path, nodes=(node, *shared)))
    return records


def _merged(defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its defaults. Limits are merged one by one."""
    merged = {**defaults, **entry}
    shared, own = defaults.get("limits"), entry.get("limits")
    if isinstance(shared, dict) and isinstance(own, dict):
        merged["limits"] = shared | own
    return merged


def _refuse_duplicates(node: yaml.Node | None, path: Path) -> None:
    """Reject duplicate fields, of which YAML would keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, path)
    elif isinstance(node, yaml.MappingNode):
        places: dict[str, str] = {}
        for key, value in node.value:
            name = str(key.value)
            place = _place(key, path)
            if name in places and name != "<<":
                message = f"{place}: {name!r} is given twice, first at {places[name]}; remove one"
                raise CatalogError(message, field=name)
            places[name] = place
            _refuse_duplicates(value, path)


def _place(node: yaml.Node, path: Path) -> str:
    return f"{path.name}:{node.start_mark.line + 1}"


def _find(node: yaml.Node, parts: Sequence[str]) -> yaml.Node | None:
    """Return the node of a field, or of the innermost part of it that is given."""
    found = None
    for part in parts:
        children: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            children = {str(key.value): (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            children = {str(index): (item, item) for index, item in enumerate(node.value)}
        if part not in children:
            break
        found, node = children[part]
    return found


def _read_json_lines(path: Path) -> list[Record]:
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line, object_pairs_hook=_unique)
            except ValueError as error:
                message = f"got {line.strip()!r:.80}, which is not JSON: {error}"
                raise CatalogError(message, place=place) from None
            records.append(Record(place=place, value=value))
    return records


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. JSON would keep the last of duplicate ones."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name!r} is given twice")
        fields[name] = value
    return fields


_READERS: Mapping[str, Callable[[Path], list[Record]]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_yaml,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
