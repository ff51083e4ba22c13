"""How commands end: which error is which exit code, and what a person is told of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from freezer.errors import CatalogError, FreezeError, InfrastructureError, IntegrityError, StoreUnreachableError, UsageError
from jobs.exits import exiting


def ended_of(error: BaseException, interrupted: str | None = None) -> tuple[object, str]:
    """The exit code, and what was said."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as caught, exiting(Console(file=said), interrupted=interrupted):
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
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_error_of_ours_is_one_line_and_its_code(error: BaseException, code: int, said: str) -> None:
    assert ended_of(error) == (code, said)


def test_an_interrupt_says_what_the_command_says_of_it() -> None:
    assert ended_of(KeyboardInterrupt(), "goes on from here") == (130, "goes on from here\n")


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    for error in (FreezeError("of one model"), KeyError("x")):
        with pytest.raises(type(error)), exiting(Console(file=io.StringIO())):
            raise error
