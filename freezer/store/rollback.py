"""Roll `latest` of a model back to an earlier version, or undo that. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freezer.errors import UsageError
from freezer.store.versions import LATEST, Version, version_of

if TYPE_CHECKING:
    from freezer.store.artifact_store import Store

BEFORE = "before-rollback"
"""Tag of what `latest` was before the last rollback, until a new version is published."""


def roll_back(store: Store, model: str, number: int | None) -> Version:
    """Make `latest` an earlier version, or what it was before the last rollback; see
    `Store.roll_back`.
    """
    layout = store.layout(model)
    tags = layout.tags()
    wanted = tags.pop(BEFORE, None)
    if number is not None:
        store.version(f"{model}:{number}")  # raises if it is not there
        wanted = tags[str(number)]
        tags[BEFORE] = tags[LATEST]
    if wanted is None:
        raise UsageError(
            f"{model} was not rolled back since its last version or --undo; roll back to a version"
            f" that `coldpress list {model} --store {store.uri}` shows"
        )
    version = version_of(model, LATEST, layout.index(wanted), store=store.uri)
    layout.check(version.index)
    layout.write_tags({**tags, LATEST: wanted})
    return version
