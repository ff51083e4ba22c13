"""The command `coldpress`: its commands, and progress on stderr while one runs.

Exit codes: 0 done, 1 refused or verification failed, 2 usage, 3 store unreachable.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer import Option

from freezer.cli.arguments import exiting, say
from freezer.cli.artifact_commands import classes, doctor, inspect, run, verify
from freezer.cli.explain_command import explain
from freezer.cli.freezing_commands import freeze
from freezer.cli.store_commands import copy, export, list_models, pull, rollback, sign
from freezer.progress import reported

CAMPAIGN_COMMANDS = "coldpress.commands"
"""Group of entry points: commands over campaigns, which only a checkout has.

Each names a typer application.
"""


class _Commands(typer.core.TyperGroup):
    """The commands of the wheel, and in a checkout those over campaigns, which are imported when
    they are used.

    The types of contexts and commands are click's or typer's own copies of them, depending on
    typer's version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return [*super().list_commands(ctx), *_campaign_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name."""
        command = super().get_command(ctx, cmd_name)
        point = None if command else _campaign_commands().get(cmd_name)
        if point is None:
            return command
        command = typer.main.get_command(point.load())
        command.name = cmd_name
        return command


def _campaign_commands() -> dict[str, EntryPoint]:
    """The entry points of CAMPAIGN_COMMANDS, by command; empty without a checkout."""
    points = entry_points(group=CAMPAIGN_COMMANDS)
    return {point.name: point for point in points if find_spec(point.module.partition(".")[0])}


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        torch = version("torch") if find_spec("torch") else "not installed"
        say(f"coldpress {version('coldpress')}, torch {torch}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of Coldpress and torch.",
        ),
    ] = False,
) -> None:
    """Freeze PyTorch models for the hardware that serves them.

    Campaigns over many models run from a checkout of Coldpress: coldpress optimize.
    """


for command in (
    *(freeze, explain, pull, copy, export, sign),
    *(verify, inspect, run, classes, doctor, rollback),
):
    app.command()(command)
app.command("list")(list_models)


def main() -> None:
    """Run the command; print an error as one line on stderr, and exit with its code."""
    with exiting(), reported(partial(print, file=sys.stderr, flush=True)):
        app()
