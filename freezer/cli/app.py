"""The command `coldpress`. Exit codes: 0 done, 1 refused or verification failed, 2 usage, 3 store unreachable."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from freezer.cli.arguments import REFUSED, UNREACHABLE, USAGE
from freezer.cli.freezing_commands import freeze
from freezer.cli.serving_commands import diff, run, verify
from freezer.cli.store_commands import classes, inspect, pull, sign
from freezer.errors import ColdpressError, StoreUnreachableError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Freeze PyTorch models for the hardware that serves them.",
)
for command in (freeze, pull, sign, verify, diff, inspect, run, classes):
    app.command()(command)


def main() -> None:
    """Run the command; print errors as one line on stderr and map them to exit codes."""
    try:
        app()
    except StoreUnreachableError as error:
        _fail(error, UNREACHABLE)
    except UsageError as error:
        _fail(error, USAGE)
    except ColdpressError as error:
        _fail(error, REFUSED)


def _fail(error: ColdpressError, code: int) -> None:
    Console(stderr=True).print(error.coded, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
