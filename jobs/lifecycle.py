"""`coldpress promote` and `gc`: move names between versions, and remove what nothing needs."""

from __future__ import annotations

import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated

import typer

from freezer.artifact import size_text
from freezer.cli import (
    JsonOption,
    StoreOption,
    console,
    exiting,
    note,
    say,
    say_error,
    say_json,
    table,
)
from freezer.codec import encode
from freezer.errors import FAILED, UsageError
from freezer.store import CANARY, HOOK, Cleaning, Garbage, Store, announce
from jobs.results import TrackingOption

promote_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
gc_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

StoreOnlyOption = Annotated[
    bool, typer.Option("--store-only", help="Leave MLflow alone, and do not ask it.")
]


def _tracking_uri(given: str | None, *, store_only: bool) -> str | None:
    """The URI of MLflow; None without one: its default database need not exist."""
    from pipeline.tracking import DEFAULT_URI, database_file, default_tracking_uri

    uri = given or default_tracking_uri()
    path = database_file(uri)
    if store_only or (uri == DEFAULT_URI and path is not None and not path.exists()):
        return None
    return uri


@promote_app.command()
@exiting()
def promote(
    model: Annotated[str, typer.Argument(help="MODEL:VERSION, MODEL:NAME or MODEL@DIGEST.")],
    to: Annotated[str, typer.Option(help=f"Name, such as prod or prod{CANARY}.")],
    share: Annotated[
        str | None, typer.Option(help=f"Of a name with {CANARY}: share of the keys, such as 10%.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the name of MODEL.")] = False,
    store: StoreOption = "./store",
    tracking_uri: TrackingOption = None,
    store_only: StoreOnlyOption = False,
    hook: Annotated[
        str | None, typer.Option(envvar=HOOK, help="URL that the move is posted to, as JSON.")
    ] = None,
) -> None:
    """Make a name point at a version, in the store and as aliases in MLflow, or in neither."""
    from pipeline.lifecycle import promote as promote_

    opened = Store.open(store)
    uri = _tracking_uri(tracking_uri, store_only=store_only)
    version, move = promote_(
        opened,
        model,
        to,
        share=None if share is None else _parsed(share),
        remove=remove,
        tracking_uri=uri,
    )
    where = "the store" if uri is None else "the store and MLflow"
    now = "nothing" if remove else f"version {move.version}"
    of_keys = f" for {move.share:.4g} of the keys" if move.share is not None else ""
    say(f"{to} of {version.model} is {now}{of_keys} (before: {move.before or 'none'}), in {where}")
    say(f"pin: {version.pin}", "dim")
    problem = announce(opened, version.model, move, hook)
    if problem:
        say(f"the move is done, but {problem}", "yellow")


def _parsed(share: str) -> float:
    try:
        number = float(share.removesuffix("%"))
    except ValueError as error:
        raise UsageError(f"--share {share!r}: expected a number, such as 10% or 0.1") from error
    return number / 100 if share.endswith("%") else number


@gc_app.command()
@exiting()
def gc(
    keep: Annotated[int, typer.Option(min=1, help="Newest versions of each model to keep.")],
    store: StoreOption = "./store",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
    grace_h: Annotated[
        float, typer.Option(min=0, help="Hours from the run that marks to one that removes.")
    ] = 24.0,
    pin: Annotated[list[str] | None, typer.Option(help="MODEL@DIGEST to keep. Repeatable.")] = None,
    signed: Annotated[
        bool, typer.Option("--signed", help="Remove old versions also if they are signed.")
    ] = False,
    tracking_uri: TrackingOption = None,
    store_only: StoreOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Mark and remove old versions, unused blobs, and finished work. What a name, a signature, a
    campaign or an alias of MLflow needs stays.
    """
    from pipeline.lifecycle import clean, needs_of
    from pipeline.tracking import aliased_artifacts

    opened = Store.open(store)
    uri = _tracking_uri(tracking_uri, store_only=store_only)
    aliased = aliased_artifacts(uri) if uri is not None else set()
    if uri is None:
        note("MLflow is not asked, so versions with an alias there may go")
    cleaning = Cleaning(
        keep=keep,
        grace_s=grace_h * 3600,
        dry_run=dry_run,
        signed=signed,
        pins=frozenset(pin or ()),
        is_needed=lambda version: any(image.digest in aliased for image in version.index),
    )
    needs = needs_of(opened, note)
    found, errors = clean(opened, cleaning, needs)
    if as_json:
        say_json([encode(item) for item in found], indent=1)
    else:
        _print_garbage(found, cleaning)
    for campaign in needs.running:
        note(f"campaign {campaign} runs: what it may need was left alone")
    for error in errors:
        say_error(error)
    if errors:
        sys.exit(FAILED)


def _print_garbage(found: Collection[Garbage], cleaning: Cleaning) -> None:
    """Print what is removed now, and what later, by kind."""
    rows = table("kind", "removed", "size", "marked", "size")
    kinds = dict.fromkeys(item.kind for item in found)
    for kind in (*kinds, "total"):
        cells = [kind]
        for removed in (True, False):
            items = [i for i in found if i.removed is removed and kind in (i.kind, "total")]
            cells += [str(len(items)), size_text(sum(item.size_bytes for item in items))]
        rows.add_row(*cells)
    console.print(rows, markup=False, highlight=False)
    since = [item.since for item in found if not item.removed]
    if since:
        due = datetime.fromtimestamp(min(since) + cleaning.grace_s, UTC)
        say(f"what is marked is removed by runs from {due.isoformat(' ', 'minutes')} on")
    if cleaning.dry_run:
        say("nothing was changed; without --dry-run what is listed is removed or marked")
