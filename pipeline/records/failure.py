"""Why a build, judge or outcome failed. The child, its task, the ledger and the reports share this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freezer.codec import decode, encode, stored_as


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why something failed.

    Attributes:
        kind: type of the failed outcome: `source`, `capture`, `timeout`, `memory`, `crash`, ... (docs/contract.md).
        code: error code in docs/errors.md. Rows of earlier releases may lack it.
        message: one sentence for people.
        log_tail: the last lines that the child printed.
        tried_bytes: memory that was not enough, for failures of memory.
    """

    kind: str = field(metadata=stored_as("failure"))
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    tried_bytes: int | None = None


def failure_to_json(failure: Failure | None) -> dict[str, Any]:
    """Return the fields that stored records contain next to their own; of None, the empty ones."""
    return encode(failure) if failure else {**encode(Failure(kind="")), "failure": None}


def failure_from_json(data: Mapping[str, Any]) -> Failure | None:
    """Return the failure among the fields of a stored record."""
    return decode(Failure, data, origin="failure") if data["failure"] else None
