"""Options and output that several commands of `coldpress` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from freezer.artifact.folder import folder_of

REFUSED, USAGE, UNREACHABLE = 1, 2, 3
"""Exit codes."""

console = Console()

StoreOption = Annotated[str, typer.Option("--store", help="URI of the store.")]

ClassOption = Annotated[str, typer.Option("--device-class", help="A device class, or auto for what this machine runs best.")]

ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Threads that calls may use. Default: torch's own, within this process's CPUs.")
]

KeysOption = Annotated[
    list[Path] | None,
    typer.Option("--key", help="A public key, PEM, that must have signed what is served. Repeatable: any."),
]

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where to run: cpu, cuda or cuda:N. Default: what the artifact is made for.")
]


def folder_or_name(reference: str) -> Path | str:
    """A path where there is an artifact folder or the text can only be a path; else the name of a model."""
    return folder_of(reference) or reference
