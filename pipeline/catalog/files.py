"""Read catalog files (YAML, JSON, JSON Lines) into plain records with their line, and
Python objects with the same fields.

Oversized files, deep nesting and duplicate fields are rejected.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Required, TypedDict

import yaml

from freezer.codec import Json, JsonView, frozen
from freezer.errors import CatalogError, UsageError, expected_names
from freezer.spec import Point

MAX_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 64

EMPTY = "CP-CATALOG-EMPTY"
"""Error code of a catalog without entries."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@frozen
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
        raise CatalogError(
            f"{path} lists no models; expected at least one entry", field="models", code=EMPTY
        )
    return records


def _read_yaml(path: Path) -> list[Record]:
    content = path.read_bytes()
    try:
        root = _composed(content, path)
        document = yaml.constructor.SafeConstructor().construct_document(root) if root else {}
    except CatalogError:
        raise
    except Exception as error:  # the constructor raises anything for `!!bool x` and the like
        raise CatalogError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise CatalogError(
            f"{path}: got a {type(document).__name__}, expected a mapping with `models:`"
        )
    for key in document.keys() - {"defaults", "models"}:
        expected = expected_names(str(key), ("defaults", "models"))
        raise CatalogError(f"{path}: the field is unknown; {expected}", field=str(key))
    defaults: Json = document.get("defaults") or {}
    models: list[Any] = document.get("models") or []
    for name, value, kind in (("defaults", defaults, dict), ("models", models, list)):
        if not isinstance(value, kind):
            raise CatalogError(
                f"{path}: got a {type(value).__name__}, expected a {kind.__name__}", field=name
            )
    if root is None or not models:
        return []
    nodes = {key.value: value for key, value in root.value}
    shared = (nodes["defaults"],) if defaults else ()
    records = []
    for node, value in zip(nodes["models"].value, models, strict=True):
        merged = _merged(defaults, value) if isinstance(value, dict) else value
        records.append(
            Record(place=_place(node, path), value=merged, file=path, nodes=(node, *shared))
        )
    return records


def _merged(defaults: JsonView, entry: JsonView) -> Json:
    """Return an entry with its defaults. Limits and budgets are merged one by one."""
    merged = {**defaults, **entry}
    for name in ("limits", "accuracy"):
        shared, own = defaults.get(name), entry.get(name)
        if isinstance(shared, dict) and isinstance(own, dict):
            merged[name] = shared | own
    return merged


def _composed(content: bytes, path: Path) -> yaml.Node | None:
    """The nodes of a YAML text, after checks of its nesting, on which the parser would crash, and
    of its size with aliases followed.
    """
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise CatalogError(f"{path}: values are nested more than {MAX_DEPTH} deep")
    root: yaml.Node | None = yaml.compose(content, Loader=_Loader)
    if root is not None:
        _check_node(root, path, 1, MAX_BYTES)
    return root


def _check_node(
    node: yaml.Node,
    path: Path,
    depth: int,
    rest: int,
) -> int:
    """Check a node; return how many bytes of the rest its own values leave, with aliases followed.

    Raises:
        CatalogError: a number or the catalog is too large, an alias contains itself, or a field is
            given twice.
    """
    if depth > MAX_DEPTH or rest <= 0:
        raise CatalogError(
            f"{_place(node, path)}: an alias contains itself, or repeats more than"
            f" {MAX_BYTES / 1e6:.0f} MB; write the values out, or write JSON Lines (.jsonl)"
        )
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag.endswith((":int", ":float"))
        if is_number and len(node.value) > MAX_DIGITS:  # `1:1:1` has base 60
            raise CatalogError(
                f"{_place(node, path)}: got a number of {len(node.value)} characters, expected at"
                f" most {MAX_DIGITS}; put a text in quotes"
            )
        return rest - len(node.value) - 8
    children = node.value
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, path)
        children = chain.from_iterable(node.value)
    for child in children:
        rest = _check_node(child, path, depth + 1, rest)
    return rest - 8


def _refuse_duplicates(node: yaml.MappingNode, path: Path) -> None:
    """Reject duplicate fields, of which YAML would keep the last."""
    places: dict[str, str] = {}
    for key, _ in node.value:
        name = str(key.value)
        place = _place(key, path)
        if name in places and name != "<<":
            raise CatalogError(
                f"{place}: {name!r} is given twice, first at {places[name]}; remove one", field=name
            )
        places[name] = place


def _place(node: yaml.Node, path: Path) -> str:
    return f"{path.name}:{node.start_mark.line + 1}"


def _find(node: yaml.Node, parts: Sequence[str]) -> yaml.Node | None:
    """Return the node of a field, or of the innermost part of it that is given."""
    found = None
    for part in parts:
        children = {}
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
                json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
            except (ValueError, RecursionError) as error:
                raise CatalogError(
                    f"got {line.strip()!r:.80}, which is not JSON: {error}", place=place
                ) from None
            records.append(Record(place=place, value=value))
    return records


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """Return the fields of an object. JSON would keep the last of duplicate ones."""
    fields = {}
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


PYTHON = "Python"
"""Name of a catalog of Python objects."""

Dims = Mapping[str, Mapping[str, int]]
Function = str | Callable[..., Any]


class CatalogEntry(TypedDict, total=False):
    """One model of a campaign, `pipeline.Entry(name=..., source=...)`, with the fields of
    docs/reference/catalog.md. A function may be given itself, if it is in a module.
    """

    name: Required[str]
    source: Required[Function]
    inputs: Any
    dims: Dims
    samples: str | Path
    args: JsonView
    weights: str
    seed: int
    method: str
    sha256: str
    trust: bool
    files: Sequence[str]
    task_metric: Function
    limits: Mapping[str, float | str]
    objective: str
    precision: Sequence[str]
    accuracy: JsonView
    device_classes: Sequence[str]
    recipes: Sequence[str]
    tags: Mapping[str, str]
    preserve: Sequence[str]
    reset: str
    threads: Sequence[int]
    points: Sequence[Point]


def as_file(entry: CatalogEntry) -> Any:
    """The entry as a catalog file has it.

    Raises:
        UsageError: a value cannot be part of a catalog.
    """
    return json.loads(json.dumps(entry, default=_text))


def _text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    if inspect.isfunction(value) and value.__module__ != "__main__":
        return f"python:{value.__module__}:{value.__qualname__}"
    raise UsageError(
        f"got {value!r:.80}, expected values of JSON, paths, and functions of modules that workers"
        " can import; move a function of this notebook or script to a module beside it"
    )
