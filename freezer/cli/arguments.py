"""Options, exit codes and output shared by the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from freezer.cli.completion import complete_class, complete_model
from freezer.errors import ColdpressError

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
"""Exit codes."""

_COLORS: Literal["auto"] | None = (
    None if os.environ.get("NO_COLOR") else "auto"
)  # rich alone would keep bold and dim text
console = Console(color_system=_COLORS)
error_console = Console(stderr=True, color_system=_COLORS)


def say(line: str, style: str = "") -> None:
    """Print one line without markup or wrapping."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def say_error(error: ColdpressError) -> None:
    """Print an error with its code on stderr."""
    error_console.print(error.coded, style="red", markup=False, highlight=False, soft_wrap=True)


def table(*headers: str) -> Table:
    """An empty table without borders."""
    return Table(*headers, box=None, show_header=bool(headers), pad_edge=False)


ModelArgument = Annotated[
    str, typer.Argument(help="MODEL or MODEL:VERSION.", autocompletion=complete_model)
]
ReferenceArgument = Annotated[
    str,
    typer.Argument(help="An artifact folder, or MODEL[:VERSION].", autocompletion=complete_model),
]
StoreOption = Annotated[str, typer.Option("--store", help="URI of the store.")]
ClassOption = Annotated[
    str,
    typer.Option(
        "--device-class",
        help="A device class, or auto for the best one of this machine.",
        autocompletion=complete_class,
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Threads for calls. Default: torch's setting.")
]
KeysOption = Annotated[
    list[Path] | None,
    typer.Option("--key", help="Public key (PEM) of an accepted signature. Repeatable."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N. Default: the artifact's device."),
]
MinVersionOption = Annotated[
    int, typer.Option("--min-version", help="Refuse an older version that the store offers.")
]
