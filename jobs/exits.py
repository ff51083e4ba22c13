"""How commands end: every error of ours as one red line and its exit code. The one place that says which code is whose."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console

from freezer.errors import ColdpressError, InfrastructureError, IntegrityError, StoreError, UsageError
from pipeline.exit_codes import INFRASTRUCTURE, INTERRUPTED, USAGE

CODES: tuple[tuple[type[ColdpressError], int], ...] = (
    (UsageError, USAGE),
    (InfrastructureError, INFRASTRUCTURE),
    (StoreError, INFRASTRUCTURE),
    (IntegrityError, INFRASTRUCTURE),
)
"""By class of error; of any other there is a traceback, since it is a fault of ours."""


@contextlib.contextmanager
def exiting(errors: Console, *, interrupted: str | None = None) -> Iterator[None]:
    """End the process where the block raises what people or machines did wrong, or is interrupted.

    Args:
        errors: where it is told.
        interrupted: what a person who presses Ctrl-C is told; None says nothing.
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
    """Print a line as it is: of an error in red."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
