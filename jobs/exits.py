"""Exit codes of commands: every Coldpress error is printed as one red line, and decides the exit
code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console

from freezer.errors import (
    ColdpressError,
    InfrastructureError,
    IntegrityError,
    StoreError,
    UsageError,
)
from pipeline.exit_codes import INFRASTRUCTURE, INTERRUPTED, USAGE

CODES: tuple[tuple[type[ColdpressError], int], ...] = (
    (UsageError, USAGE),
    (InfrastructureError, INFRASTRUCTURE),
    (StoreError, INFRASTRUCTURE),
    (IntegrityError, INFRASTRUCTURE),
)
"""Exit code by class of error. Other errors are bugs, and keep their traceback."""


@contextlib.contextmanager
def exiting(errors: Console, *, interrupted: str | None = None) -> Iterator[None]:
    """Exit if the block raises an error of a person or a machine, or is interrupted.

    Args:
        errors: console for the error.
        interrupted: message after Ctrl-C, or None.
    """
    try:
        yield
    except tuple(kind for kind, _ in CODES) as error:
        say(errors, error.coded)
        sys.exit(next(code for kind, code in CODES if isinstance(error, kind)))
    except KeyboardInterrupt:
        if interrupted is not None:
            say(errors, interrupted)
        sys.exit(INTERRUPTED)


def say(console: Console, text: str, style: str = "red") -> None:
    """Print a line without markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
