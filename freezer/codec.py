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
import math
import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, dataclass_transform

from freezer.errors import ColdpressError, IntegrityError

Json = dict[str, Any]
"""A JSON object, as it is made."""

JsonView = Mapping[str, Any]
"""A JSON object, as it is read."""

_Record = TypeVar("_Record")

MAX_INT = 2**63
_SCALARS = (bool, int, float, str, NoneType)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(made: type[_Record]) -> type[_Record]:
    """Make a class a frozen dataclass with slots, whose fields are given by name; a decorator.

    All share the methods of `_Shared`: compiling them for each class took 20 ms of each start.
    """
    made = dataclass(init=False, kw_only=True, slots=True, eq=False, repr=False)(made)
    for name in _SHARED:
        setattr(made, name, vars(_Shared)[name])
    return made


class _Signature:
    """What `help` shows of a class: its fields."""

    def __get__(self, _: object, made: Any) -> Signature:
        return Signature(list(map(_parameter, fields(made))))


def _parameter(item: Field[Any]) -> Parameter:
    default = Parameter.empty if _default(item) is MISSING else _default(item)
    return Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=item.type)


class _Shared:
    """The methods of all records."""

    __signature__ = _Signature()

    def __init__(self, /, *others: object, **given: object) -> None:
        for each in fields(cast(Any, self)):
            value = given.pop(each.name) if each.name in given else _default(each)
            if value is MISSING:
                raise TypeError(f"{type(self).__qualname__} needs {each.name}, given by name")
            object.__setattr__(self, each.name, value)
        if others or given:
            names = ", ".join(each.name for each in fields(cast(Any, self)))
            raise TypeError(f"{type(self).__qualname__} takes {names}, given by name")
        if (check := getattr(self, "__post_init__", None)) is not None:
            check()

    def __setattr__(self, name: str, _: object = None) -> None:
        raise FrozenInstanceError(f"{name} of a {type(self).__qualname__} cannot change")

    __delattr__ = __setattr__

    def __setstate__(self, state: tuple[None, Json]) -> None:  # else copies would set attributes
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return _compared(self) == _compared(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(_compared(self))

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(cast(Any, self))
            if each.repr
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"


_SHARED = vars(_Shared).keys() - {"__module__", "__dict__", "__weakref__", "__doc__"}


def _compared(record: Any) -> tuple[object, ...]:
    return tuple(getattr(record, each.name) for each in fields(record) if each.compare)


OMIT_DEFAULT: Mapping[str, bool] = {"omit_default": True}
"""Metadata of a field that is written only where it differs from its default."""


def written_if(condition: Callable[[Any], bool]) -> dict[str, object]:
    """Metadata of a field that is written only where its record meets a condition."""
    return {"written_if": condition}


def keyed_by(attribute: str) -> dict[str, object]:
    """Metadata of a tuple of dataclasses that is written as an object, whose keys are this
    attribute of the items.
    """
    return {"keyed_by": attribute}


def stored_as(key: str) -> dict[str, object]:
    """Metadata of a field whose JSON key differs from its name."""
    return {"key": key}


def encode(record: object) -> Json:
    """The JSON form of a dataclass instance: its fields in order, tuples as lists."""
    data = {}
    for item in fields(cast(Any, record)):
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


def finite(value: object) -> object:
    """A JSON value with null for infinities and NaN, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def read_json(data: bytes, *, origin: str) -> Any:
    """Parse JSON of any origin that this release can also write and print.

    Raises:
        IntegrityError: it is not UTF-8 JSON, or has a NaN, an infinite number
            or half of a surrogate pair.
    """
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{origin} is not JSON that Coldpress reads: {error}; pull it again"
        ) from None
    return value


def read_record(kind: type[_Record], data: bytes, *, origin: str) -> _Record:
    """Parse the JSON text of a dataclass instance; raises what `read_json` and `decode` do."""
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
        return cast(_Record, _record(kind, data))
    except _MismatchError as error:
        place = f"field {'.'.join(error.path)!r} " if error.path else "the record "
        raise IntegrityError(f"{origin}: {place}{error}") from None


@contextmanager
def checked_row(kind: str) -> Iterator[None]:
    """Turn the errors of a row of another form into IntegrityError; also a decorator.

    Args:
        kind: kind of the row, for the message.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise IntegrityError(
            f"{kind} row of the ledger: {type(error).__name__}: {error}; restore the ledger from a"
            " backup"
        ) from None


class _MismatchError(Exception):
    """A value that its type does not allow, and the path of fields to it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


def _encode(value: Any) -> Any:
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


def _decode(kind: Any, value: Any) -> object:
    """Check a value, and convert it to a type."""
    if kind is Any:
        return value
    if kind in _SCALARS:
        return _scalar(kind, value)
    if kind is Path:  # records of work in progress pass their own folder
        return value if isinstance(value, Path) else Path(_scalar(str, value))
    if kind is bytes:
        return _bytes(value)
    form: Any = typing.get_origin(kind)
    args = typing.get_args(kind)
    if form is Literal:
        if value not in args:
            raise _mismatch(value, f"one of {', '.join(map(repr, args))}")
        return value
    if form in (Union, UnionType):
        return _union(args, value)
    if form is tuple:
        return _tuple(args, value)
    if is_dataclass(kind):
        return _record(kind, value)
    return {key: _at(key, args[1], item) for key, item in _object(value).items()}


def _mismatch(value: object, expected: str) -> _MismatchError:
    return _MismatchError(f"is {value!r:.80}; expected {expected}")


def _scalar(kind: type, value: Any) -> Any:
    fits = isinstance(value, float | int if kind is float else kind)
    if not fits or (isinstance(value, int) and abs(value) > MAX_INT):
        raise _mismatch(value, kind.__name__)
    return value


def _bytes(value: object) -> bytes:
    try:
        return b64decode(_scalar(str, value), validate=True)
    except ValueError as error:
        raise _MismatchError(f"is not base64: {error}") from None


def _union(members: tuple[Any, ...], value: Any) -> object:
    """The value as the first member that it fits; else the mismatch that is deepest in it."""
    mismatches = []
    try:
        for member in members:
            try:
                return _decode(member, value)
            except _MismatchError as error:
                mismatches.append(error)
        raise max(mismatches, key=lambda error: len(error.path))
    finally:
        mismatches.clear()  # they refer to this frame, and so to the variables of all callers


def _tuple(args: tuple[Any, ...], value: Any) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise _mismatch(value, "a list")
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
    if len(kinds) != len(value):
        raise _MismatchError(f"has {len(value)} items; expected {len(kinds)}")
    parts = enumerate(zip(kinds, value, strict=True))
    return tuple(_at(str(index), kind, item) for index, (kind, item) in parts)


def _object(value: object) -> JsonView:
    if not isinstance(value, Mapping):
        raise _mismatch(value, "an object")
    return value


def _record(kind: Any, value: object) -> object:
    data = _object(value)
    arguments = {}
    for item, hint in _hinted(kind):
        key, attribute = _key(item), item.metadata.get("keyed_by")
        if key in data:
            part = data[key]
            if attribute is not None:
                part = [{attribute: name, **_object(part[name])} for name in _object(part)]
            arguments[item.name] = _at(key, hint, part)
        elif _default(item) is MISSING:
            raise _MismatchError(f"lacks {key!r}")
    try:
        return kind(**arguments)
    except (ColdpressError, ValueError) as error:  # of __post_init__
        raise _MismatchError(f"is wrong: {error}") from None


def _at(key: str, kind: Any, value: object) -> object:
    try:
        return _decode(kind, value)
    except _MismatchError as error:
        error.path.insert(0, key)
        raise


@functools.cache
def _hinted(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Every field of a dataclass with its type."""
    hints = typing.get_type_hints(kind)
    return [(item, hints[item.name]) for item in fields(kind)]
