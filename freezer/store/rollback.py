"""Roll `latest` of a model back to an earlier version, or undo that. Imports no torch.

Tags keep what would be lost otherwise: `N-latest` is what `latest` was while N was the newest
version, if version N lacks some of it, and `before-rollback` is what it was before the last
rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from freezer.errors import UsageError
from freezer.store.oci_layout import Descriptor
from freezer.store.versions import LATEST, Version, version_of

if TYPE_CHECKING:
    from freezer.store.artifact_store import Store

WHOLE, BEFORE = "-latest", "before-rollback"


def roll_back(store: Store, model: str, number: int | None) -> Version:
    """Make `latest` what it was at an earlier version, or before the last rollback; see
    `Store.roll_back`.
    """
    layout = store.layout(model)
    tags = with_whole(layout.tags(), store.find(model))
    wanted = tags.pop(BEFORE, None)
    if number is not None:
        store.version(f"{model}:{number}")  # raises if it is not there
        wanted = tags.get(f"{number}{WHOLE}", tags[str(number)])
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


def with_whole(tags: Mapping[str, Descriptor], latest: Version | None) -> dict[str, Descriptor]:
    """Tags that also keep what `latest` is, if the version of its number lacks some of it."""
    kept = dict(tags)
    own = kept.get(str(latest.number)) if latest else None
    if latest and own and own.digest != kept[LATEST].digest:
        kept[f"{latest.number}{WHOLE}"] = kept[LATEST]
    return kept
