"""The command `coldpress`. Exit codes: 0 done, 1 refused or verification failed, 2 usage, 3 store unreachable."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from freezer.cli.arguments import REFUSED, UNREACHABLE, USAGE, say
from freezer.cli.artifact_commands import classes, diff, env, inspect, pull, run, sign, verify
from freezer.cli.freezing_commands import freeze
from freezer.cli.progress import progress
from freezer.errors import ColdpressError, StoreUnreachableError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"coldpress {version('coldpress')}, torch {version('torch')}")
        raise typer.Exit


VERSION_HELP = "Print the versions of Coldpress and torch."


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION_HELP)] = False,
) -> None:
    """Freeze PyTorch models for the hardware that serves them.

    Campaigns over many models run from a checkout of Coldpress: python -m jobs.optimize.
    """


for command in (freeze, pull, sign, verify, diff, inspect, run, env, classes):
    app.command()(command)


def main() -> None:
    """Run the command; print errors as one line on stderr and map them to exit codes."""
    try:
        with progress():
            app()
    except ColdpressError as error:
        Console(stderr=True).print(error.coded, style="red", markup=False, highlight=False, soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            Console(stderr=True).print(note, markup=False, highlight=False, soft_wrap=True)
        codes = {StoreUnreachableError: UNREACHABLE, UsageError: USAGE}
        sys.exit(next((code for kind, code in codes.items() if isinstance(error, kind)), REFUSED))
