"""Read catalog files (YAML, JSON, JSON Lines) into plain records with their line.

Oversized files, deep nesting and duplicate fields are rejected.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from freezer.errors import CatalogError, expected_names

YAML_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 64

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
        name, *parts = field.split(".")
        pairs = [_pair(node, name) for node in self.nodes]
        found = [pair for pair in pairs if pair]
        if self.file is None or not found:
            return self.place
        key, value = found[0]
        for part in parts:
            inner = _pair(value, part)
            if inner is None:
                break
            key, value = inner
        return _place(key, self.file)


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
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise CatalogError(
            f"{path} cannot be read: it {problem}; name a catalog file",
        )
    try:
        records = reader(path)
    except OSError as error:
        raise CatalogError(
            f"{path} cannot be read: {error.strerror or error}; name a catalog file",
        ) from error
    if not records:
        raise CatalogError(
            f"{path} lists no models; expected at least one entry",
            field="models",
            code=EMPTY,
        )
    return records


def _read_yaml(path: Path) -> list[Record]:
    size_mb = path.stat().st_size / 1e6
    if size_mb * 1e6 > YAML_BYTES:
        raise CatalogError(
            f"{path}: got {size_mb:.0f} MB of YAML, expected at most {YAML_BYTES / 1e6:.0f} MB;"
            " write it as JSON Lines (.jsonl), or split it"
        )
    try:
        root = _compose(_decoded(path.read_bytes(), str(path)), path)
        document = yaml.constructor.SafeConstructor().construct_document(root) if root else None
    except CatalogError:
        raise
    except Exception as error:  # the constructor raises anything for `!!bool x` and the like
        raise CatalogError(f"{path} is not YAML: {_one_line(error)}") from error
    if document is None:
        message = f"{path} is empty; expected `models:` with at least one entry"
        raise CatalogError(message, field="models", code=EMPTY)
    if not isinstance(document, dict):
        got = type(document).__name__
        raise CatalogError(f"{path}: got a {got}, expected a mapping with `models:`")
    for key in set(document) - {"defaults", "models"}:
        expected = expected_names(str(key), ("defaults", "models"))
        raise CatalogError(f"{path}: the field is unknown; {expected}", field=str(key))
    defaults = document.get("defaults") or {}
    models = document.get("models") or []
    if not isinstance(defaults, dict):
        message = f"{path}: got a {type(defaults).__name__}, expected a mapping of fields"
        raise CatalogError(message, field="defaults")
    if not isinstance(models, list):
        message = f"{path}: got a {type(models).__name__}, expected a list of entries"
        raise CatalogError(message, field="models")
    assert root is not None
    top = {key.value: value for key, value in root.value}
    nodes = top["models"].value if models else ()
    shared = (top["defaults"],) if defaults else ()
    return [
        Record(place=_place(node, path), value=value, file=path, nodes=(node, *shared))
        for node, value in zip(nodes, map(partial(_merged, defaults), models), strict=True)
    ]


def _merged(defaults: Mapping[str, Any], value: Any) -> Any:
    """Return an entry with its defaults. Limits are merged one by one."""
    if not isinstance(value, dict):
        return value
    merged = {**defaults, **value}
    if isinstance(defaults.get("limits"), dict) and isinstance(value.get("limits"), dict):
        merged["limits"] = {**defaults["limits"], **value["limits"]}
    return merged


def _compose(text: str, path: Path) -> yaml.Node | None:
    """Parse a YAML text to nodes.

    Nesting is checked first, since the parser crashes the process on deep nesting. It is checked
    again with aliases followed, like the size: one that contains itself has no end.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise CatalogError(
                f"{path}: values are nested more than {MAX_DEPTH} deep; a catalog needs about 10"
            )
    root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    if root is not None:
        _check_node(root, path, 1, {})
    return root


def _check_node(
    node: yaml.Node, path: Path, depth: int, checked: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """Check a node, and return its depth and size in characters, with aliases followed.

    Args:
        node: the node.
        path: the catalog.
        depth: the number of nodes that contain it, and itself.
        checked: what was returned for other nodes.

    Raises:
        CatalogError: a number or the catalog is too large, an alias contains itself, or a field is
            given twice.
    """
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag.endswith((":int", ":float"))
        if is_number and len(node.value) > MAX_DIGITS:  # `1:1:1` has base 60
            raise CatalogError(
                f"{_place(node, path)}: got a number of {len(node.value)} characters, expected at"
                f" most {MAX_DIGITS}; put a text in quotes"
            )
        return 1, len(node.value) + 1
    height, size = checked.get(id(node), (1, 1))
    if id(node) not in checked and depth <= MAX_DEPTH:
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, path)
        pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
        for child in itertools.chain.from_iterable(pairs):
            inner, length = _check_node(child, path, depth + 1, checked)
            height, size = max(height, inner + 1), size + length
        checked[id(node)] = height, size
    if depth + height - 1 > MAX_DEPTH or size > YAML_BYTES:
        raise CatalogError(
            f"{_place(node, path)}: an alias contains itself, nests values more than {MAX_DEPTH}"
            f" deep, or repeats more than {YAML_BYTES / 1e6:.0f} MB; write the values out"
        )
    return height, size


def _check_keys(node: yaml.MappingNode, path: Path) -> None:
    """Reject duplicate fields, of which YAML would keep the last."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            continue
        if key.value in seen:
            raise CatalogError(
                f"{_place(key, path)}: {key.value!r} is given twice, first in line"
                f" {seen[key.value]}; remove one",
                field=key.value,
            )
        seen[key.value] = key.start_mark.line + 1


def _place(node: yaml.Node, path: Path) -> str:
    return f"{path.name}:{node.start_mark.line + 1}"


def _pair(node: yaml.Node, part: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the key and the value of a field, or an item of a list twice."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None


def _read_json_lines(path: Path) -> list[Record]:
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path.name}:{number}"
            text = _decoded(line, place).strip()
            if text:
                records.append(Record(place=place, value=_parsed_json(text, place)))
    return records


def _parsed_json(text: str, place: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if len(names) != len(pairs):
            raise ValueError(f"{names.most_common(1)[0][0]!r} is given twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        return value
    except (ValueError, RecursionError) as error:
        got = text if len(text) < 60 else f"{text[:60]}…"
        problem = "nested too deep" if isinstance(error, RecursionError) else str(error)
        message = f"got {got!r}, which is not JSON: {problem}"
        raise CatalogError(message, place=place) from None


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CatalogError(
            f"{place} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8",
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_READERS: Mapping[str, Callable[[Path], list[Record]]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_yaml,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
