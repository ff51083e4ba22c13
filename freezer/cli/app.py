"""The command `coldpress`.

Exit codes: 0 done, 1 refused or verification failed, 2 usage, 3 store unreachable.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from freezer.cli.arguments import REFUSED, UNREACHABLE, USAGE, error_console, say, say_error
from freezer.cli.artifact_commands import classes, diff, inspect, pull, run, sign, verify
from freezer.cli.doctor import doctor
from freezer.cli.freezing_commands import freeze
from freezer.cli.progress import progress
from freezer.cli.store_commands import list_models, rollback
from freezer.errors import ColdpressError, StoreUnreachableError, UsageError

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
        if (known := super().get_command(ctx, cmd_name)) is not None:
            return known
        if (point := _campaign_commands().get(cmd_name)) is None:
            return None
        command = typer.main.get_command(point.load())
        command.name = cmd_name
        return command


def _campaign_commands() -> dict[str, EntryPoint]:
    """The entry points of CAMPAIGN_COMMANDS, by command; empty without a checkout."""
    return {
        point.name: point
        for point in entry_points(group=CAMPAIGN_COMMANDS)
        if _is_here(point.module)
    }


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


app = typer.Typer(
    cls=_Commands,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION_HELP)
    ] = False,
) -> None:
    """Freeze PyTorch models for the hardware that serves them.

    Campaigns over many models run from a checkout of Coldpress: python -m jobs.optimize.
    """


for command in (freeze, pull, sign, verify, diff, inspect, run, classes, doctor, rollback):
    app.command()(command)
app.command("list")(list_models)


def main() -> None:
    """Run the command; print errors as one line on stderr and map them to exit codes."""
    try:
        with progress():
            app()
    except ColdpressError as error:
        say_error(error)
        for note in getattr(error, "__notes__", ()):
            error_console.print(note, markup=False, highlight=False, soft_wrap=True)
        codes = {StoreUnreachableError: UNREACHABLE, UsageError: USAGE}
        sys.exit(next((code for kind, code in codes.items() if isinstance(error, kind)), REFUSED))
