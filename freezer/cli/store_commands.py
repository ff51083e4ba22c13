"""The commands `coldpress pull`, `sign`, `inspect` and `classes`: they read JSON and copy files, and import no torch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from freezer.artifact.describe import describe, readable
from freezer.artifact.folder import MANIFEST, Artifact
from freezer.artifact.manifest import Manifest
from freezer.cli.options import ClassOption, StoreOption, console, folder_or_name
from freezer.errors import IncompatibleError, UsageError
from freezer.files.paths import check_folder
from freezer.hardware.device_classes import device_class
from freezer.hardware.machine import detect
from freezer.serving.compatibility import rungs
from freezer.store.store import Store, Version


def pull(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    dest: Annotated[Path, typer.Option(help="The folder to write; new, or empty.")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
) -> None:
    """Copy the artifact for this machine into a folder; every digest is verified."""
    if not (dest / MANIFEST).is_file():  # one that holds this very artifact is kept
        check_folder(dest, "--dest")
    opened = Store.open(store)
    version = opened.version(model)
    name = _pick(version, device_class_)
    artifact = opened.pull(version, name, dest)
    size_mb = sum(item.size_bytes for item in artifact.manifest.contents) / 1e6
    console.print(f"{version.model}:{version.number} for {name} is in {dest} ({size_mb:.1f} MB)", highlight=False, soft_wrap=True)


def sign(
    model: Annotated[str, typer.Argument(help="MODEL or MODEL:VERSION.")],
    key: Annotated[Path, typer.Option(help="A private EC key on P-256, PEM without a password.")],
    store: StoreOption = "./store",
    device_class_: Annotated[
        str, typer.Option("--device-class", help="Sign the artifact of this class alone. Default: those of all.")
    ] = "all",
) -> None:
    """Sign what a store has published, after its digests were compared; pulled folders hold the signatures too."""
    opened = Store.open(store)
    version = opened.version(model)
    for name in sorted(version.images) if device_class_ == "all" else [device_class_]:
        done = "signed" if opened.sign(version, name, key) else "signed by this key before"
        console.print(f"{version.model}:{version.number} for {name}: {done}", highlight=False, soft_wrap=True)


def inspect(
    reference: Annotated[str, typer.Argument(help="An artifact folder, or MODEL[:VERSION].")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
    code: Annotated[bool, typer.Option("--code", help="Print the code of the frozen model.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Print the graph of the frozen model.")] = False,
    captured: Annotated[bool, typer.Option("--captured", help="With --code or --graph: of the model as it was captured.")] = False,
) -> None:
    """Print an artifact's manifest and what freezing did, or the code or graph of its model."""
    kinds = [name for name, wanted in (("code", code), ("graph", graph)) if wanted]
    if captured and not kinds:
        raise UsageError("--captured goes with --code or --graph")
    folder = folder_or_name(reference)
    if isinstance(folder, Path):
        artifact = Artifact.read(folder)
        _inspect(artifact.manifest, {}, as_json=as_json, text=_readable(artifact, kinds, captured))
        return
    opened = Store.open(store)
    version = opened.version(folder)
    name = _pick(version, device_class_)
    text = ""
    if kinds:
        with tempfile.TemporaryDirectory(prefix="coldpress-") as scratch:
            text = _readable(opened.materialize(version, name, Path(scratch)), kinds, captured)
    _inspect(opened.manifest(version, name), version.images, as_json=as_json, text=text)


def classes(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Print this machine's device classes, most specific first, and why not the next better ones."""
    machine = detect()
    if as_json:
        sys.stdout.write(json.dumps(asdict(machine)) + "\n")
        return
    for name in machine.classes:
        console.print(name, highlight=False)
    for name, reason in machine.next_better.items():
        console.print(f"not {name}: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _pick(version: Version, wanted: str) -> str:
    """The device class to take of a version: the one asked for, or the most specific that this machine runs."""
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


def _readable(artifact: Artifact, kinds: Sequence[str], captured: bool) -> str:
    return "\n".join(readable(artifact, kind, captured=captured) for kind in kinds)


def _inspect(manifest: Manifest, classes: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print the manifest as it is, the text where one was asked for, or else the manifest in words."""
    if as_json:
        sys.stdout.write(manifest.to_bytes().decode())
    elif text:
        sys.stdout.write(text)
    else:
        _print_manifest(manifest, classes)


def _print_manifest(manifest: Manifest, classes: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe(manifest, list(classes)):
        table.add_row(name, Text(value))
    console.print(table, highlight=False)
