"""The fields of a catalog entry, parsed by pydantic."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freezer.errors import CatalogError

DAY_S = 86_400.0

_Count = Annotated[int, Field(ge=1, lt=2**31)]

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LimitsModel(_Strict):
    """The fields of `limits`."""

    speedup_min: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    error_ratio_max: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    timeout_s: float | None = Field(default=None, gt=0, le=7 * DAY_S, allow_inf_nan=False)
    memory_gb: float | None = Field(default=None, ge=0.1, le=100_000, allow_inf_nan=False)
    latency_ms_max: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    size_mb_max: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class EntryModel(_Strict):
    """The fields of an entry."""

    name: str
    source: str
    args: dict[str, Any] = {}
    weights: Literal["random"] | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    method: str | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    trust: bool = False
    inputs: dict[str, Any] | list[Any] | None = None
    dims: dict[str, Any] = {}
    samples: str | None = None
    files: list[str] = []
    task_metric: str | None = None
    limits: LimitsModel = LimitsModel()
    device_classes: list[str] = Field(default=["auto"], min_length=1)
    recipes: list[str] = Field(default=["auto"], min_length=1)
    tags: dict[str, str] = {}
    preserve: list[str] = []
    reset: str | None = None
    threads: list[_Count] | None = Field(default=None, min_length=1)
    points: list[dict[str, _Count]] | None = Field(default=None, min_length=1)


def as_catalog_error(error: ValidationError, label: str, place: str) -> CatalogError:
    """Return the first error of pydantic, and the number of others."""
    first, *others = error.errors()
    location = [str(part) for part in first["loc"]]
    more = f"; and {len(others)} more in this entry" if others else ""
    code = "CP-ENTRY-LIMITS" if location[:1] == ["limits"] else "CP-ENTRY-FIELD"
    message = _in_words(first, location)
    return CatalogError(f"{message}{more}", entry=label, field=".".join(location), place=place, code=code)


def _in_words(problem: Any, location: Sequence[str]) -> str:
    kind, got, context = problem["type"], f"got {str(problem['input'])[:80]!r}", problem.get("ctx", {})
    if kind == "missing":
        return "the field is required; add it"
    if kind == "extra_forbidden":
        known = list(LimitsModel.model_fields if location[0] == "limits" else EntryModel.model_fields)
        close = get_close_matches(location[-1], known, n=1)
        return "the field is unknown; " + (f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}")
    expected = {
        "string_type": "a text; put it in quotes",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list: [...]",
        "dict_type": "a mapping: {...}",
        "model_type": "a mapping: {...}",
        "finite_number": "a finite number",
        "too_short": "at least one; remove the field to use the default",
        "string_pattern_mismatch": "64 hexadecimal digits in lower case, as sha256sum prints them",
    }.get(kind)
    if expected is None:
        bounds = [f"{words} {context[name]:g}" for name, words in _BOUNDS.items() if name in context]
        expected = f"a number {' and '.join(bounds)}" if bounds else str(context.get("expected", problem["msg"]))
    return f"{got}, expected {expected}"
