"""The commands `coldpress list` and `coldpress rollback`. Imports no torch."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from freezer.artifact import size_text
from freezer.cli.arguments import REFUSED, StoreOption, console, say, say_error, table
from freezer.cli.completion import complete_model
from freezer.codec import encode
from freezer.errors import UsageError
from freezer.store import ListedVersion, Store, newest_versions, versions_of


def list_models(
    model: Annotated[
        str | None,
        typer.Argument(help="Model to list all versions of.", autocompletion=complete_model),
    ] = None,
    store: StoreOption = "./store",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models of a store, or all versions of one, newest first."""
    opened = Store.open(store)
    logging.getLogger("coldpress").info("reading the indexes of %s", opened.uri)
    found, problems = newest_versions(opened) if model is None else (versions_of(opened, model), [])
    if as_json:
        sys.stdout.write(
            json.dumps({"store": opened.uri, "versions": [_as_json(item) for item in found]}) + "\n"
        )
    elif model is None:
        _print_models(found)
        say(f"{len(found)} model{'' if len(found) == 1 else 's'} in {opened.uri}")
    else:
        _print_versions(found)
    for error in problems:
        say_error(error)
    if problems:
        sys.exit(REFUSED)


def rollback(
    model: Annotated[
        str, typer.Argument(help="MODEL:VERSION to go back to.", autocompletion=complete_model)
    ],
    store: StoreOption = "./store",
) -> None:
    """Make `latest` an earlier version, for deployments that follow it; nothing is deleted."""
    name, _, number = model.partition(":")
    if not number.isdecimal():
        raise UsageError(
            f"{model!r} names no version; name one that `coldpress list {name} --store {store}`"
            f" shows: {name}:1"
        )
    opened = Store.open(store)
    before = opened.version(name)
    version = opened.roll_back(name, int(number))
    say(
        f"latest of {name} is version {version.number} (before: {before.number}), for"
        f" {', '.join(sorted(version.images))}"
    )
    for missing in sorted(before.images.keys() - version.images.keys()):
        say(
            f"{missing} has no artifact in version {version.number}: a lesser class or portable"
            " serves it",
            style="yellow",
        )


def _as_json(item: ListedVersion) -> dict[str, Any]:
    return {
        **encode(item),
        "published": datetime.fromtimestamp(item.published, UTC).isoformat(timespec="seconds"),
    }


def _print_models(found: Iterable[ListedVersion]) -> None:
    rows = table("model", "version", "published", "device class", "size", "signed")
    rows.columns[0].overflow = "fold"
    rows.columns[4].justify = "right"
    for item in found:
        first = (
            item.model,
            str(item.version),
            f"{datetime.fromtimestamp(item.published, UTC):%Y-%m-%d}",
        )
        for index, artifact in enumerate(item.artifacts):
            size = size_text(artifact.size_bytes)
            rows.add_row(
                *(first if index == 0 else ("", "", "")),
                artifact.device_class,
                size,
                _signed(artifact.signed),
            )
    console.print(rows, markup=False, highlight=False)


def _print_versions(found: Iterable[ListedVersion]) -> None:
    rows = table("version", "published (UTC)", "device class", "size", "signed", "digest")
    rows.columns[3].justify = "right"
    for item in found:
        name = f"{item.version} latest" if "latest" in item.tags else str(item.version)
        first = (name, f"{datetime.fromtimestamp(item.published, UTC):%Y-%m-%d %H:%M}")
        for index, artifact in enumerate(item.artifacts):
            digest = artifact.digest.removeprefix("sha256:")[:12]
            size = size_text(artifact.size_bytes)
            rows.add_row(
                *(first if index == 0 else ("", "")),
                artifact.device_class,
                size,
                _signed(artifact.signed),
                digest,
            )
    console.print(rows, markup=False, highlight=False)


def _signed(signed: bool) -> str:
    return "yes" if signed else "no"
