"""Convert frozen dataclasses to JSON values and back, by their type annotations. Imports no torch.

Fields may be JSON scalars, Literals, paths, bytes, tuples, `Mapping[str, X]`, nested dataclasses,
unions of these, and `Any`.
Annotations must resolve at run time: import their types outside `TYPE_CHECKING`. A field's metadata
may change its JSON form:

    multiple_of: int = field(default=1, metadata=OMIT_DEFAULT)
    dims: tuple[Dim, ...] = field(default=(), metadata=keyed_by("name"))
    num_threads: int = field(metadata=stored_as("threads"))
"""

from __future__ import annotations

import functools
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from freezer.errors import ColdpressError, IntegrityError

_Record = TypeVar("_Record")
_Decoder = Callable[[Any], Any]

_MAX_DEPTH = 64
"""Deepest nesting of JSON that is read."""

MAX_INT = 2**63

_SCALARS: Mapping[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    NoneType: (NoneType,),
}


OMIT_DEFAULT: Mapping[str, bool] = {"omit_default": True}
"""Metadata of a field that is written only where it differs from its default."""


def written_if(condition: Callable[[Any], bool]) -> dict[str, Any]:
    """Metadata of a field that is written only where its record meets a condition."""
    return {"written_if": condition}


def keyed_by(attribute: str) -> dict[str, Any]:
    """Metadata of a tuple of dataclasses that is written as an object, whose keys are this
    attribute of the items.
    """
    return {"keyed_by": attribute}


def stored_as(key: str) -> dict[str, Any]:
    """Metadata of a field whose JSON key differs from its name."""
    return {"key": key}


def encode(record: Any) -> dict[str, Any]:
    """The JSON form of a dataclass instance: its fields in order, tuples as lists."""
    data = {}
    for item in fields(record):
        value = getattr(record, item.name)
        condition, attribute = item.metadata.get("written_if"), item.metadata.get("keyed_by")
        if condition is not None and not condition(record):
            continue
        if item.metadata.get("omit_default") and value == _default(item):
            continue
        value = _encode(value)
        if attribute is not None:
            value = {part.pop(attribute): part for part in value}
        data[_key(item)] = value
    return data


def read_json(data: bytes, *, origin: str) -> Any:
    """Parse JSON of any origin that this release can also write and print.

    Raises:
        IntegrityError: it is not UTF-8 JSON, is nested too deeply, or has a NaN, an infinite number
            or half of a surrogate pair.
    """
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{origin} is not JSON that Coldpress reads: {error}; pull it again"
        ) from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        parts = (
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        )
        level = [item for part in parts for item in part]
        if not level:
            return value
    raise IntegrityError(f"{origin} is nested over {_MAX_DEPTH} levels; pull it again")


def read_record(kind: type[_Record], data: bytes, *, origin: str) -> _Record:
    """Parse the JSON text of a dataclass instance.

    Raises:
        IntegrityError: as for `read_json` and `decode`.
    """
    return decode(kind, read_json(data, origin=origin), origin=origin)


def decode(kind: type[_Record], data: object, *, origin: str) -> _Record:
    """The dataclass instance that `encode` wrote, also after a pass through JSON text.

    Unknown keys are ignored; missing fields take their defaults.

    Args:
        kind: the dataclass.
        data: its JSON form.
        origin: where the data came from, for the message.

    Raises:
        IntegrityError: a field is missing or has a wrong value; the message names it.
    """
    try:
        record: _Record = _record(kind, data)
        return record
    except _MismatchError as error:
        place = f"field {'.'.join(error.path)!r} " if error.path else "the record "
        raise IntegrityError(f"{origin}: {place}{error}") from None


class _MismatchError(Exception):
    """A value that its type does not allow, and the path of fields to it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


def _encode(value: Any) -> Any:
    if isinstance(value, (str, int, float, NoneType)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return encode(value) if is_dataclass(value) else value


def _default(item: Field[Any]) -> object:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _key(item: Field[Any]) -> str:
    return str(item.metadata.get("key", item.name))


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    """The function that checks and converts values of a type."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind is Path:
        return lambda value: Path(
            _scalar((str, Path), value)
        )  # records of work in progress pass their own folder
    if kind is bytes:
        return _bytes
    if kind in _SCALARS:
        return functools.partial(_scalar, _SCALARS[kind])
    if origin is Literal:
        return functools.partial(_one_of, args)
    if origin in (Union, UnionType):
        scalars = tuple(accepted for member in args for accepted in _SCALARS.get(member, ()))
        return functools.partial(
            _union, scalars, [member for member in args if member not in _SCALARS]
        )
    if origin is tuple:
        return functools.partial(_tuple, args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_mapping, args[1])
    assert is_dataclass(kind), f"{kind} is not a type that this module supports"
    return functools.partial(_record, kind)


def _scalar(allowed: tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, allowed) or (isinstance(value, int) and abs(value) > MAX_INT):
        raise _MismatchError(
            f"is {value!r:.80}; expected {' or '.join(item.__name__ for item in allowed)}"
        )
    return value


def _bytes(value: Any) -> bytes:
    try:
        return b64decode(_scalar((str,), value), validate=True)
    except ValueError as error:
        raise _MismatchError(f"is not base64: {error}") from None


def _one_of(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise _MismatchError(f"is {value!r:.80}; expected one of {', '.join(map(repr, allowed))}")
    return value


def _union(scalars: tuple[type, ...], others: list[Any], value: Any) -> Any:
    """A scalar as it is; of several dataclasses the first whose required fields are all there."""
    if not others or isinstance(value, scalars):
        return _scalar(scalars, value)
    fitting = (
        kind for kind in others if len(others) == 1 or _required(kind) <= _object(value).keys()
    )
    return _decoder(next(fitting, others[0]))(value)


def _tuple(args: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _MismatchError(f"is {value!r:.80}; expected a list")
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
    if len(kinds) != len(value):
        raise _MismatchError(f"has {len(value)} items; expected {len(kinds)}")
    return tuple(
        _at(str(index), _decoder(kind), item)
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _MismatchError(f"is {value!r:.80}; expected an object")
    return value


def _mapping(kind: Any, value: Any) -> dict[str, Any]:
    decoder = _decoder(kind)
    return {key: _at(key, decoder, item) for key, item in _object(value).items()}


def _record(kind: Any, value: Any) -> Any:
    data = _object(value)
    if missing := sorted(_required(kind) - data.keys()):
        raise _MismatchError(f"lacks {missing[0]!r}")
    found = {
        name: _at(key, decoder, data[key]) for name, key, decoder in _fields(kind) if key in data
    }
    try:
        return kind(**found)
    except (ColdpressError, ValueError) as error:  # of __post_init__
        raise _MismatchError(f"is wrong: {error}") from None


def _keyed(attribute: str, decoder: _Decoder, value: Any) -> Any:
    return decoder([{attribute: name, **_object(part)} for name, part in _object(value).items()])


def _at(key: str, decoder: _Decoder, value: Any) -> Any:
    try:
        return decoder(value)
    except _MismatchError as error:
        error.path.insert(0, key)
        raise


@functools.cache
def _fields(kind: Any) -> list[tuple[str, str, _Decoder]]:
    """Name, JSON key and decoder of every field of a dataclass."""
    hints, found = get_type_hints(kind), []
    for item in fields(kind):
        decoder = _decoder(hints[item.name])
        if attribute := item.metadata.get("keyed_by"):
            decoder = functools.partial(_keyed, attribute, decoder)
        found.append((item.name, _key(item), decoder))
    return found


@functools.cache
def _required(kind: Any) -> frozenset[str]:
    return frozenset(
        _key(item)
        for item in fields(kind)
        if item.default is MISSING and item.default_factory is MISSING
    )
