"""Exit codes and messages of errors."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from freezer.errors import (
    CatalogError,
    FreezeError,
    InfrastructureError,
    IntegrityError,
    StoreUnreachableError,
    UsageError,
)
from jobs.exits import exiting


def ended_of(error: BaseException) -> tuple[object, str]:
    """Return the exit code and the output."""
    said = io.StringIO()
    with (
        pytest.raises(SystemExit) as caught,
        exiting(Console(file=said), interrupted="interrupted"),
    ):
        raise error
    return caught.value.code, said.getvalue()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no [such] option"), 2, "CP-USAGE: no [such] option\n"),
        (CatalogError("bad", entry="a"), 2, "CP-CATALOG: entry 'a': bad\n"),
        (InfrastructureError("Ray is gone", code="CP-RAY"), 3, "CP-RAY: Ray is gone\n"),
        (StoreUnreachableError("no store"), 3, "CP-STORE-UNREACHABLE: no store\n"),
        (IntegrityError("damage"), 3, "CP-INTEGRITY: damage\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_every_error_has_a_line_and_an_exit_code(
    error: BaseException, code: int, said: str
) -> None:
    assert ended_of(error) == (code, said)


def test_other_errors_keep_their_traceback() -> None:
    for error in (FreezeError("of one model"), KeyError("x")):
        with pytest.raises(type(error)), exiting(Console(file=io.StringIO())):
            raise error
