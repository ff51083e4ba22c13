"""Findings of checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check.

    Attributes:
        check: the checked thing, in one or two words.
        text: result of the check.
        level: `error` if Coldpress cannot work here as requested, `warning` if it works, but slowly
            or only in part.
        remedy: unless the level is `ok`, a command that fixes it or shows its cause, with a comment
            on what to do with the result.
    """

    check: str
    text: str
    level: Level = "ok"
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest:
    """What to check beside the machine.

    Attributes:
        store: URI of a store; None for no check.
        tracking_uri: URI of MLflow; None for no check.
        address: address of a Ray cluster; None for RAY_ADDRESS, or no check.
        campaigns: whether this is a checkout, from which campaigns run, and not a deployment.
    """

    store: str | None = None
    tracking_uri: str | None = None
    address: str | None = None
    campaigns: bool = False


Check = Callable[[CheckRequest], Iterable[Finding]]
