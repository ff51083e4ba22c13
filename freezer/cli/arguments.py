"""Options, output and exits shared by the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from typer import Argument, Option, Typer

from freezer.codec import finite
from freezer.errors import FAILED, INTERRUPTED, USAGE, ColdpressError, without_torch
from freezer.progress import transfers

console = Console()
error_console = Console(stderr=True)


def say(line: str, style: str = "", *, on: Console = console) -> None:
    """Print one line without markup or wrapping."""
    on.print(
        line,
        style=style,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def say_error(error: ColdpressError) -> None:
    """Print an error with its code, and its notes, on stderr."""
    say(error.coded, "red", on=error_console)
    for line in getattr(error, "__notes__", ()):
        say(line, on=error_console)


def note(line: str) -> None:
    """Print a remark on stderr."""
    say(line, "dim", on=error_console)


@contextmanager
def transfer_bar() -> Iterator[None]:
    """Show the transfers of the block on stderr, if that is a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=error_console, transient=True)
    task = bar.add_task("", total=0)

    def show(num_bytes: int, planned_bytes: int) -> None:
        bar.update(task, advance=num_bytes, total=(bar.tasks[0].total or 0) + planned_bytes)

    if not error_console.is_terminal:
        yield
        return
    with bar, transfers(show):
        yield


def say_json(value: object, *, indent: int | None = None) -> None:
    """Print a value as JSON, with null for infinities and NaN."""
    sys.stdout.write(
        json.dumps(
            finite(value),
            indent=indent,
            allow_nan=False,
        )
        + "\n"
    )


def command_app() -> Typer:
    """An application of one command over campaigns; see `CAMPAIGN_COMMANDS`."""
    return Typer(add_completion=False, pretty_exceptions_enable=False)


def table(*headers: str) -> Table:
    """An empty table without borders."""
    return Table(
        *headers,
        box=None,
        show_header=bool(headers),
        pad_edge=False,
    )


@contextmanager
def exiting(*, refused: int = FAILED, interrupted: str | None = None) -> Iterator[None]:
    """Print an error of the block, and exit with its code; also a decorator of commands.

    Args:
        refused: exit code in place of FAILED, which some commands use for results.
        interrupted: message after Ctrl-C; None leaves that to the caller.
    """
    try:
        yield
    except ColdpressError as error:
        say_error(error)
        sys.exit(refused if error.exit_code == FAILED else error.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        say_error(without_torch("this command"))
        sys.exit(USAGE)
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        say(interrupted, "red", on=error_console)
        sys.exit(INTERRUPTED)


def answer_signals(promise: str) -> None:
    """Answer the first SIGINT or SIGTERM of this process at once, and raise KeyboardInterrupt; end
    the process at the second. An ignored signal stays ignored.

    Args:
        promise: what the user can do afterwards.
    """
    answered = False

    def answer(number: int, frame: FrameType | None) -> None:
        nonlocal answered
        if answered:
            os._exit(INTERRUPTED)
        answered = True
        with suppress(OSError):
            os.write(2, f"\nstopping; {promise}; again to force\n".encode())
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, answer)


ModelArgument = Annotated[str, Argument(help="MODEL, MODEL:VERSION or MODEL@DIGEST.")]
MaybeModelArgument = Annotated[str | None, Argument(help="Default: all models.")]
ReferenceArgument = Annotated[
    str,
    Argument(help="An artifact folder, or MODEL[:VERSION or @DIGEST]."),
]
NoiseOption = Annotated[
    bool,
    Option(
        "--accept-noise",
        help="On busy machines, publish what is faster even by disturbed measurements.",
    ),
]
StoreOption = Annotated[
    str, Option("--store", help="URI of the store: a folder, s3://, gs:// or oci://.")
]
FolderOrStoreOption = Annotated[
    str | None, Option("--store", help="URI of the store. Default: ./store.")
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]
ClassOption = Annotated[
    str,
    Option(
        "--device-class",
        help="A device class, or auto for the best one of this machine.",
    ),
]
ThreadsOption = Annotated[
    int | None, Option("--threads", help="Threads for calls. Default: torch's setting.")
]
KeysOption = Annotated[
    list[Path] | None,
    Option("--key", help="Public key (PEM) of an accepted signature. Repeatable."),
]
DeviceOption = Annotated[
    str | None,
    Option("--device", help="cpu, cuda or cuda:N. Default: the artifact's device."),
]
MinVersionOption = Annotated[
    int, Option("--min-version", help="Refuse an older version that the store offers.")
]
