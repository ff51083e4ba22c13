"""The commands `coldpress pull`, `sign`, `inspect` and `classes`. Imports no torch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from freezer.artifact.describe import describe, readable
from freezer.artifact.folder import MANIFEST, Artifact
from freezer.artifact.manifest import Manifest
from freezer.cli.arguments import ClassOption, StoreOption, console, folder_or_name, say
from freezer.errors import IncompatibleError, UsageError
from freezer.files.paths import check_folder
from freezer.hardware.device_classes import device_class
from freezer.hardware.machine import detect
from freezer.serving.compatibility import rungs
from freezer.store.store import Store, Version


def pull(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    dest: Annotated[Path, typer.Option(help="New or empty folder to write.")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
) -> None:
    """Copy the artifact for this machine into a folder, and verify every digest."""
    if not (dest / MANIFEST).is_file():  # a folder with this artifact is kept
        check_folder(dest, "--dest")
    opened = Store.open(store)
    version = opened.version(model)
    name = _pick(version, device_class_)
    artifact = opened.pull(version, name, dest)
    size_mb = sum(item.size_bytes for item in artifact.manifest.contents) / 1e6
    say(f"{version.model}:{version.number} for {name} is in {dest} ({size_mb:.1f} MB)")


def sign(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    key: Annotated[Path, typer.Option(help="Private EC key on P-256 (PEM, without a password).")],
    store: StoreOption = "./store",
    device_class_: Annotated[str, typer.Option("--device-class", help="Sign only this class. Default: all.")] = "all",
) -> None:
    """Verify and sign published artifacts; pulled folders contain the signatures too."""
    opened = Store.open(store)
    version = opened.version(model)
    for name in sorted(version.images) if device_class_ == "all" else [device_class_]:
        done = "signed" if opened.sign(version, name, key) else "signed by this key before"
        say(f"{version.model}:{version.number} for {name}: {done}")


def inspect(
    reference: Annotated[str, typer.Argument(help="An artifact folder, or MODEL[:VERSION].")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest.")] = False,
    code: Annotated[bool, typer.Option("--code", help="Print the code of the frozen model.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Print the graph of the frozen model.")] = False,
    captured: Annotated[bool, typer.Option("--captured", help="With --code or --graph: of the captured model.")] = False,
) -> None:
    """Print an artifact's manifest and what freezing did, or the code or graph of its model."""
    kinds = [name for name, wanted in (("code", code), ("graph", graph)) if wanted]
    if captured and not kinds:
        raise UsageError("--captured needs --code or --graph")
    with tempfile.TemporaryDirectory(prefix="coldpress-") as scratch:
        folder, published = folder_or_name(reference), tuple[str, ...]()
        if isinstance(folder, Path):
            artifact = Artifact.read(folder)
        else:
            opened = Store.open(store)
            version = opened.version(folder)
            published = tuple(version.images)
            paths = None if kinds else ()
            artifact = opened.materialize(version, _pick(version, device_class_), Path(scratch), paths=paths)
        if as_json:
            sys.stdout.write(artifact.manifest.to_bytes().decode())
        elif kinds:
            sys.stdout.write("\n".join(readable(artifact, kind, captured=captured) for kind in kinds))
        else:
            _print_manifest(artifact.manifest, published)


def classes(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print this machine's device classes, most specific first, and the reasons against the next better ones."""
    machine = detect()
    if as_json:
        sys.stdout.write(json.dumps(asdict(machine)) + "\n")
        return
    for name in machine.classes:
        say(name)
    for name, reason in machine.next_better.items():
        say(f"not {name}: {reason}", style="dim")


def _pick(version: Version, wanted: str) -> str:
    """The requested device class, or the most specific one that this machine runs."""
    if wanted != "auto":
        device_class(wanted)
        return wanted
    found = rungs(version.images, detect())
    if not found:
        published = ", ".join(sorted(version.images))
        raise IncompatibleError(
            f"{version.model}:{version.number} is published for {published}; this machine runs {', '.join(detect().classes)}"
        )
    return found[0]


def _print_manifest(manifest: Manifest, classes: Sequence[str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe(manifest, classes):
        table.add_row(name, Text(value))
    console.print(table, highlight=False)
