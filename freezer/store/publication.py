"""Write a new version of a model, or make a name point at another one, under the lock of its
layout. Imports no torch.

A name is a tag on the index of a version: `latest`, `prod`. The tag `_notes` is on a document with
the moves of all names. `prod-canary` serves a share of the keys of `prod`.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING

from freezer.artifact import Artifact, Manifest
from freezer.codec import OMIT_DEFAULT, encode, frozen, read_record
from freezer.errors import ColdpressError, IntegrityError, UsageError, first_line
from freezer.files import http_session
from freezer.hardware import DEVICE_CLASSES, PORTABLE
from freezer.store.oci_layout import Descriptor, Layout, OciImage
from freezer.store.versions import LATEST, Version, merged, version_of

if TYPE_CHECKING:
    from freezer.store.artifact_store import Store

BEFORE = "before-rollback"
"""Tag of what `latest` was before the last rollback, until a new version is published."""

NOTES = "_notes"
CANARY = "-canary"
"""Suffix of the name that serves a share of the keys of another one."""

MAX_MOVES = 1000
_MEDIA_NOTES = "application/vnd.coldpress.notes.v1+json"
_POINTER = re.compile(r"(?!v[0-9])[a-z][a-z0-9]*([_-][a-z0-9]+)*")
"""Names that tags of registries and aliases of MLflow may have."""

HOOK = "COLDPRESS_HOOK"
"""Environment variable with the URL that moves are posted to."""

HOOK_S = (3, 5)
"""Timeouts of its connection and of its answer."""


@frozen
class Move:
    """What a name was made to point at.

    Attributes:
        version: number of the version; 0 where the name was removed.
        digest: of its index.
        before: number of the version that it pointed at; 0 for a new name.
        by: user and machine.
        time: seconds since the epoch.
        share: of the keys, for a canary.
    """

    name: str
    version: int
    digest: str
    before: int
    by: str
    time: float
    share: float | None = field(default=None, metadata=OMIT_DEFAULT)


@frozen
class Notes:
    """What a store notes of a model besides its versions.

    Attributes:
        moves: moves of names, the oldest first.
        marked: when versions were first found to be garbage, in seconds since the epoch.
    """

    moves: tuple[Move, ...] = ()
    marked: Mapping[str, float] = field(default_factory=dict, metadata=OMIT_DEFAULT)

    def share(self, name: str) -> float:
        """The share of keys that a canary serves; 0 without one."""
        moves = [move for move in self.moves if move.name == name]
        return (moves[-1].share or 0.0) if moves else 0.0


def read_notes(layout: Layout) -> Notes:
    """The notes of a model; empty without any."""
    stored = layout.tags(NOTES).get(NOTES)
    if stored is None:
        return Notes()
    data = layout.blob(layout.image(stored).config)
    return read_record(Notes, data, origin=f"the notes of {layout.model}")


def write_notes(layout: Layout, notes: Notes) -> Descriptor:
    """Write the notes of a model, and return what their tag must name."""
    blob = layout.write_json(encode(notes), _MEDIA_NOTES)
    return layout.write_manifest(OciImage(config=blob, layers=(blob,)), {})


def chosen_tag(layout: Layout, tag: str, key: str) -> str:
    """The tag that serves a key: that of the canary for its share of all keys, the same ones each
    time; more if the share grows.
    """
    canary = f"{tag}{CANARY}"
    if canary not in layout.tags(canary):
        return tag
    return canary if in_share(layout.model, tag, key, read_notes(layout).share(canary)) else tag


def in_share(model: str, name: str, key: str, share: float) -> bool:
    """Whether a key is among the share of keys that a canary serves."""
    digest = hashlib.sha256(f"{model}:{name}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def write_version(
    store: Store,
    model: str,
    source_key: str,
    artifacts: Sequence[Artifact],
    carried: Sequence[Descriptor],
    decided: Collection[str],
) -> Version:
    """Publish a version of stored files, unless it would equal the newest; see `Store.publish`."""
    layout = store.layout(model)
    numbers, tags = store.versions(model), layout.tags()
    number = numbers[-1] + 1 if numbers else 1
    same = before = None
    if numbers:
        before = store.find(model)
        newest = store.find(f"{model}:{numbers[-1]}")
        if newest is not None and newest.source_key == source_key:
            same = newest
    new = [_image(layout, artifact, same, number) for artifact in artifacts]
    images = merged(same.index if same else (), merged(carried, new), decided)
    if same is not None and same.index == images:
        if before is not None and before.number < same.number:  # rolled back
            return same
        number = same.number
    descriptor = tags.get(str(number)) or layout.write_index(
        images, version=number, source_key=source_key
    )
    version = Version(
        model=model,
        number=number,
        source_key=source_key,
        index=images,
        descriptor=descriptor,
    )
    changed = [str(number)]
    if before is None or PORTABLE in version.images or PORTABLE not in before.images:
        changed.append(LATEST)  # what serves any machine, if `latest` did
    if any(tag not in tags or tags[tag].digest != descriptor.digest for tag in changed):
        layout.retag({**dict.fromkeys(changed, descriptor), BEFORE: None})
    return version


def _image(
    layout: Layout,
    artifact: Artifact,
    same: Version | None,
    number: int,
) -> Descriptor:
    """The image of an artifact: the one that a version of the same source has, or a new one."""
    manifest = artifact.manifest
    for image in same.images_of(manifest.device_class) if same else ():
        known = None
        with suppress(IntegrityError):  # it is lost, and written again
            known = Manifest.from_bytes(layout.artifact_manifest(image), origin=image.digest)
        if known and replace(known, version=manifest.version).to_bytes() == manifest.to_bytes():
            return image
    return layout.write_image(artifact, version=number)


def roll_back(store: Store, model: str, number: int | None) -> Version:
    """Make `latest` an earlier version, or what it was before the last rollback; see
    `Store.roll_back`.
    """
    layout = store.layout(model)
    tags = layout.tags(BEFORE, LATEST, str(number))
    wanted, before = tags.get(BEFORE), None
    if number is not None:
        store.version(f"{model}:{number}")  # raises if it is not there
        wanted, before = tags[str(number)], tags[LATEST]
    if wanted is None:
        raise UsageError(
            f"{model} was not rolled back since its last version or --undo; roll back to a version"
            f" that `coldpress list {model} --store {store.uri}` shows"
        )
    version = version_of(layout, LATEST, wanted, store=store.uri)
    layout.check(version.index)
    move = _move_of(store, model, LATEST, version)
    layout.retag({BEFORE: before, LATEST: wanted, **_noted(layout, move)})
    return version


def check_name(name: str, share: float | None) -> None:
    """Check the name that a version is promoted to.

    Raises:
        UsageError: it is reserved or malformed, or only one of name and share is a canary's.
    """
    if not _POINTER.fullmatch(name) or name in (LATEST, BEFORE, *DEVICE_CLASSES):
        raise UsageError(
            f"--to {name!r}: expected lowercase letters, digits, `-` and `_`, a letter first, and"
            f" none of {LATEST} (`coldpress rollback`), v1 and device classes; for example prod"
        )
    if name.endswith(CANARY) != (share is not None) or not 0 <= (share or 0) <= 1:
        raise UsageError(
            f"--to {name} with the share {share}: a name that ends in {CANARY} needs --share from"
            " 0% to 100%, and others have none"
        )


def promote(store: Store, reference: str, name: str, share: float | None, *, remove: bool) -> Move:
    """Make a name point at a version; see `Store.promote`."""
    version = store.version(reference)
    layout = store.layout(version.model)
    layout.check(version.index)
    move = _move_of(store, version.model, name, None if remove else version, share)
    if remove and not move.before:
        raise UsageError(f"{version.model} has no name {name}; `coldpress history` lists all moves")
    if move.version != move.before or (share or 0.0) != read_notes(layout).share(name):
        target = None if remove else version.descriptor
        layout.retag({name: target, **_noted(layout, move)})
    return move


def take_back(store: Store, model: str, move: Move) -> None:
    """Undo a move, unless the name was moved again since."""
    layout = store.layout(model)
    notes = read_notes(layout)
    if [each for each in notes.moves if each.name == move.name][-1:] != [move]:
        return
    wanted = store.version(f"{model}:{move.before}").descriptor if move.before else None
    undone = replace(notes, moves=tuple(each for each in notes.moves if each != move))
    layout.retag({move.name: wanted, NOTES: write_notes(layout, undone)})


def _move_of(
    store: Store, model: str, name: str, version: Version | None, share: float | None = None
) -> Move:
    known = store.find(f"{model}:{name}")
    return Move(
        name=name,
        version=version.number if version else 0,
        digest=version.descriptor.digest if version else "",
        before=known.number if known else 0,
        by=f"{user_name()}@{platform.node()}",
        time=time.time(),
        share=share,
    )


def user_name() -> str:
    """The user of this process, by number where the user has no name, as in containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def _noted(layout: Layout, move: Move) -> dict[str, Descriptor]:
    """The tag of the notes with a further move."""
    notes = read_notes(layout)
    notes = replace(notes, moves=(*notes.moves, move)[-MAX_MOVES:])
    return {NOTES: write_notes(layout, notes)}


def announce(store: Store, model: str, move: Move, url: str | None = None) -> str:
    """Post a move to a hook, unless the name pointed there before.

    Args:
        store, model, move: what moved.
        url: of the hook; default: that of the environment, if there is one.

    Returns:
        Why that failed, in one sentence; empty where it did not.
    """
    url = url or os.environ.get(HOOK)
    if not url or move not in read_notes(store.layout(model)).moves:
        return ""
    event = {"event": "moved", "store": store.uri, "model": model, **encode(move)}
    try:
        http_session().post(url, json=event, timeout=HOOK_S).raise_for_status()
    except (OSError, ValueError, ColdpressError) as error:  # of requests
        return f"the hook {url} did not get it: {first_line(error)}"
    return ""
