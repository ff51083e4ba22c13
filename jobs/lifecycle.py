"""`coldpress promote` and `gc`: move names between versions, and remove what nothing needs."""

from __future__ import annotations

import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated

from typer import Argument, Option

from freezer.artifact.description import size_text
from freezer.cli import (
    StoreOption,
    command_app,
    console,
    exiting,
    note,
    say,
    say_error,
    table,
)
from freezer.errors import FAILED, UsageError
from freezer.store import CANARY, HOOK, Cleaning, Garbage, Store, announce

promote_app = command_app()
gc_app = command_app()

NO_MLFLOW = "none"

MlflowOption = Annotated[
    str | None,
    Option(
        "--tracking-uri",
        envvar="MLFLOW_TRACKING_URI",
        help="URI of MLflow, or `none` to leave it alone. Default: sqlite:///mlflow.db, if it is"
        " there.",
    ),
]


def _tracking_uri(given: str | None) -> str | None:
    """The URI of MLflow; None without one."""
    from pipeline.tracking import DEFAULT_URI, database_file

    path = database_file(DEFAULT_URI)
    default = DEFAULT_URI if path is not None and path.exists() else None
    return None if given == NO_MLFLOW else given or default


@promote_app.command()
@exiting()
def promote(
    model: Annotated[str, Argument(help="MODEL:VERSION, MODEL:NAME or MODEL@DIGEST.")],
    to: Annotated[str, Option(help=f"Name, such as prod or prod{CANARY}.")],
    share: Annotated[
        str | None, Option(help=f"Of a name with {CANARY}: share of the keys, such as 10%.")
    ] = None,
    remove: Annotated[bool, Option("--remove", help="Remove the name of MODEL.")] = False,
    store: StoreOption = "./store",
    tracking_uri: MlflowOption = None,
    hook: Annotated[
        str | None, Option(envvar=HOOK, help="URL that the move is posted to, as JSON.")
    ] = None,
) -> None:
    """Make a name point at a version, in the store and as aliases in MLflow, or in neither."""
    from pipeline.lifecycle import promote as promote_

    opened = Store.open(store)
    uri = _tracking_uri(tracking_uri)
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
    keep: Annotated[int, Option(min=1, help="Newest versions of each model to keep.")],
    store: StoreOption = "./store",
    dry_run: Annotated[bool, Option("--dry-run", help="Change nothing.")] = False,
    grace_h: Annotated[
        float, Option(min=0, help="Hours from the run that marks to one that removes.")
    ] = 24.0,
    pin: Annotated[list[str] | None, Option(help="Version to keep. Repeatable.")] = None,
    signed: Annotated[
        bool, Option("--signed", help="Remove old versions also if they are signed.")
    ] = False,
    tracking_uri: MlflowOption = None,
) -> None:
    """Mark and remove old versions, unused blobs, and finished work. What a name, a signature, a
    campaign or an alias of MLflow needs stays.
    """
    from pipeline.lifecycle import clean, needs_of
    from pipeline.tracking import aliased_artifacts

    opened, uri = Store.open(store), _tracking_uri(tracking_uri)
    aliased = set() if uri is None else aliased_artifacts(uri)
    cleaning = Cleaning(
        keep=keep,
        grace_s=grace_h * 3600,
        dry_run=dry_run,
        signed=signed,
        pins=frozenset(opened.version(each).pin for each in pin or ()),
        is_needed=lambda version: any(image.digest in aliased for image in version.index),
    )
    needs = needs_of(opened, note)
    found, errors = clean(opened, cleaning, needs)
    _print_garbage(found, cleaning)
    if uri is None:
        note("MLflow was not asked for aliases")
    for campaign in needs.running:
        note(f"campaign {campaign} runs: what it may need was left alone")
    for error in errors:
        say_error(error)
    if errors:
        sys.exit(FAILED)


def _print_garbage(found: Collection[Garbage], cleaning: Cleaning) -> None:
    """Print what is removed now, and what later, by kind."""
    rows = table("kind", "removed", "size", "marked", "size")
    for kind in (*dict.fromkeys(item.kind for item in found), "total"):
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
