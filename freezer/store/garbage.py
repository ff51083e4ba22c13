"""Remove old versions of a model, and blobs that nothing needs. Imports no torch.

What is found to be garbage is first marked with the time, and removed by a later run, if it is
garbage still after a grace period. So whoever writes or reads it meanwhile, without a lock, has
that time to end. Blobs are marked in STORE/.coldpress/garbage/MODEL/marks.json, versions in the
notes of the model. A version first loses its number; its files are marked then. A registry lists no
blobs, and removes unused ones itself: there a version's manifests are deleted with its tags.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import field, replace

from freezer.codec import frozen, read_json
from freezer.errors import StoreUnreachableError, UsageError
from freezer.files import RemoteError
from freezer.store.artifact_store import Store
from freezer.store.copying import closure
from freezer.store.forms import referrers_tag
from freezer.store.local_files import WORK
from freezer.store.oci_layout import MANIFESTS, Descriptor
from freezer.store.publication import NOTES, read_notes, write_notes
from freezer.store.versions import LATEST, NUMBER, Version, pinned, signature_tag, version_of

MARKS = f"{WORK}/garbage"


@frozen
class Garbage:
    """Something that nothing needs.

    Attributes:
        kind: `versions`, `blobs`, or a folder of the work folder.
        since: when it was found to be garbage first, in seconds since the epoch.
        removed: whether this run removes it; otherwise a later one does.
    """

    kind: str
    name: str
    size_bytes: int
    since: float
    removed: bool


@frozen
class Cleaning:
    """What to remove.

    Attributes:
        keep: number of newest versions to keep of each model.
        grace_s: time from the mark to the removal.
        dry_run: whether nothing is changed.
        signed: whether signed versions may be removed, too.
        pins: pins of versions to keep.
        is_needed: whether something outside the store needs a version.
        now: seconds since the epoch.
    """

    keep: int
    grace_s: float
    dry_run: bool = False
    signed: bool = False
    pins: Collection[str] = ()
    is_needed: Callable[[Version], bool] = lambda _: False
    now: float = field(default_factory=time.time)

    def found(self, kind: str, name: str, size_bytes: int, since: float | None) -> Garbage:
        """Something that is garbage now, and was marked before if `since` says so."""
        since = self.now if since is None else since
        return Garbage(
            kind=kind,
            name=name,
            size_bytes=size_bytes,
            since=since,
            removed=since + self.grace_s <= self.now,
        )


def marks_in(store: Store, path: str) -> dict[str, float]:
    """When things were marked, by name, from a file of marks; empty without it."""
    try:
        marks: dict[str, float] = read_json(store.files.read(path), origin=store.files.where(path))
    except FileNotFoundError:
        return {}
    return marks


def write_marks(store: Store, path: str, found: Collection[Garbage]) -> None:
    """Write the marks of what is not removed yet, if they changed."""
    marks = {item.name: item.since for item in found if not item.removed}
    if marks != marks_in(store, path):
        store.files.prepare(path.rpartition("/")[0])
        store.files.write(path, json.dumps(marks, indent=1).encode())


def collect(store: Store, model: str, cleaning: Cleaning) -> list[Garbage]:
    """Mark or remove what is garbage of one model, under its lock; of a dry run only find it.

    Raises:
        IntegrityError: a version is damaged, so that nobody knows what it needs; nothing was
            removed.
        UsageError: the registry does not delete.
        StoreUnreachableError: the store cannot be read or written.
    """
    if not cleaning.dry_run:
        return store.write_model(
            model, lambda: None, lambda: _Model(store, model, cleaning).remove()
        )
    try:
        return _Model(store, model, cleaning).find()
    except OSError as error:
        raise StoreUnreachableError(f"store {store.uri} cannot be read: {error}") from error


class _Model:
    """The tags of a model, and which of them end."""

    def __init__(self, store: Store, model: str, cleaning: Cleaning) -> None:
        self._store, self._model, self._cleaning = store, model, cleaning
        self._layout = store.layout(model)
        self._tags = self._layout.tags()
        self._notes = read_notes(self._layout)
        self._marks = f"{MARKS}/{model}/marks.json"
        self._old = self._old_versions()
        self._versions = {
            tag: cleaning.found("versions", f"{model}:{tag}", 0, self._notes.marked.get(tag))
            for tag in self._old
        }
        self._gone = self._ending_tags()

    def find(self) -> list[Garbage]:
        """Everything that is garbage."""
        return [*self._versions.values(), *self._blobs()]

    def remove(self) -> list[Garbage]:
        """Remove what was marked long enough, tags first, and mark the rest."""
        blobs = self._blobs()
        if self._store.registry is not None:
            self._delete_manifests()
        left = self._gone.keys() & self._layout.tags(*self._gone).keys()
        if left:
            self._layout.retag(dict.fromkeys(left))
        marked = {tag: item.since for tag, item in self._versions.items() if not item.removed}
        if marked != self._notes.marked:
            notes = write_notes(self._layout, replace(self._notes, marked=marked))
            self._layout.retag({NOTES: notes})
        for item in blobs:
            if item.removed:
                self._store.files.remove(f"{self._model}/blobs/sha256/{item.name}")
        if self._store.registry is None:
            write_marks(self._store, self._marks, blobs)
        return [*self._versions.values(), *blobs]

    def _old_versions(self) -> dict[str, Version]:
        """The versions that nothing needs, by number."""
        numbers = sorted((tag for tag in self._tags if NUMBER.fullmatch(tag)), key=int)
        named = {found.digest for tag, found in self._tags.items() if tag not in numbers}
        latest = self._store.version(self._model).number
        before = [number for number in numbers if int(number) < latest]
        kept = {*numbers[max(0, len(numbers) - self._cleaning.keep) :], *before[-1:]}
        old = {}
        for number in numbers:
            digest = self._tags[number].digest
            pin = f"{self._model}@{digest}"
            if number in kept or digest in named or pin in self._cleaning.pins:
                continue
            version = version_of(self._layout, number, self._tags[number], store=self._store.uri)
            signed = any(signature_tag(image) in self._tags for image in version.index)
            if not self._cleaning.is_needed(version) and (self._cleaning.signed or not signed):
                old[number] = version
        return old

    def _ending_tags(self) -> dict[str, Descriptor]:
        """The tags that end now: those of versions and of their classes, and of signatures of
        images that no other version has.
        """
        ending = {number for number, item in self._versions.items() if item.removed}
        rest: set[str] = set()
        for tag, descriptor in self._tags.items():
            if NUMBER.fullmatch(tag) and tag not in ending:
                rest.update(each.digest for each in self._layout.index(descriptor).manifests)
        names = set(ending)
        for number in ending:
            names.update(tag for tag in self._tags if tag.startswith(f"{number}-"))
            names.discard(f"{number}-{LATEST}")  # of earlier releases: states of `latest`
            for image in self._old[number].index:
                if image.digest not in rest:
                    names |= {signature_tag(image), referrers_tag(image)}
        return {tag: found for tag, found in self._tags.items() if tag in names}

    def _needed(self) -> set[str]:
        """The digests that remaining tags, and pins, need."""
        roots = [found for tag, found in self._tags.items() if tag not in self._gone]
        for pin in self._cleaning.pins:
            model, _, digest = pin.partition("@")
            found = pinned(self._layout, digest) if model == self._model else None
            roots += [found] if found else []
        needed: set[str] = set()
        for root in roots:
            needed.update(each.digest for each in closure(self._layout, root))
        return needed

    def _blobs(self) -> list[Garbage]:
        """The blobs that nothing needs."""
        sizes = self._store.files.sizes(f"{self._model}/blobs/sha256")
        if not sizes:
            return []
        needed = self._needed()
        marks = marks_in(self._store, self._marks)
        return [
            self._cleaning.found("blobs", name, size, marks.get(name))
            for name, size in sorted(sizes.items())
            if f"sha256:{name}" not in needed
        ]

    def _delete_manifests(self) -> None:
        """Delete the manifests of ending tags from a registry, indexes before what they name.

        Raises:
            UsageError: the registry refuses.
        """
        needed = self._needed() if self._gone else set()
        for descriptor in self._gone.values():
            for part in reversed(list(closure(self._layout, descriptor))):
                if part.media_type not in MANIFESTS or part.digest in needed:
                    continue
                needed.add(part.digest)  # deleted
                try:
                    self._store.files.remove(self._layout.path(part.digest, part.media_type))
                except RemoteError as error:
                    raise UsageError(
                        f"{self._store.uri} deletes nothing ({error}); allow it where it runs"
                        " (docker-registry: storage.delete.enabled), or use its own tools"
                    ) from error
