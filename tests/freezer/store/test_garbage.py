"""What is removed from a store, and what stays, in folders, buckets and registries."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.errors import IntegrityError, UsageError
from freezer.store import Cleaning, Garbage, Store, collect, loss_of
from tests.support.commands import finished
from tests.support.keys import make_pair
from tests.support.registries import Answer, Front
from tests.support.steps import flip_a_byte, write_plain_artifact

NOW = Cleaning(keep=1, grace_s=0.0)
DAY_S = 86_400.0


@pytest.fixture
def any_store(anywhere: Store, tmp_path: Path) -> Store:
    return filled(anywhere, tmp_path)


def filled(store: Store, tmp_path: Path, num_versions: int = 5) -> Store:
    """Publish versions of `tiny`, each with a payload of its own."""
    for number in range(1, num_versions + 1):
        content = bytes([number]) * 1000
        artifact = write_plain_artifact(tmp_path / f"made-{number}", content)
        store.publish("tiny", source_key=str(number), artifacts=[artifact])
    return store


def by_kind(found: list[Garbage], kind: str, *, removed: bool) -> set[str]:
    return {item.name for item in found if item.kind == kind and item.removed is removed}


def is_whole(store: Store) -> bool:
    """Whether every version that is left has all its files."""
    numbers = store.versions("tiny")
    return bool(numbers) and not any(loss_of(store, f"tiny:{n}", "portable") for n in numbers)


def test_what_is_named_pinned_or_signed_stays(any_store: Store, tmp_path: Path) -> None:
    key, _ = make_pair(tmp_path, "own")
    any_store.promote("tiny:1", "prod")
    any_store.sign(any_store.version("tiny:2"), "portable", key)
    cleaning = replace(NOW, pins={any_store.version("tiny:3").pin})
    assert not by_kind(collect(any_store, "tiny", cleaning), "versions", removed=True)
    assert any_store.versions("tiny") == [1, 2, 3, 4, 5], "4 is what a rollback would take"
    any_store.roll_back("tiny", 4)
    collect(any_store, "tiny", cleaning)
    assert any_store.versions("tiny") == [1, 2, 3, 4, 5], "3 now is, and 5 is for --undo"
    any_store.roll_back("tiny", None)
    any_store.promote("tiny:5", "prod")
    removed = by_kind(
        collect(any_store, "tiny", replace(NOW, signed=True)), "versions", removed=True
    )
    assert removed == {"tiny:1", "tiny:2", "tiny:3"}
    assert any_store.versions("tiny") == [4, 5]
    assert is_whole(any_store)
    any_store.pull(any_store.version("tiny:prod"), "portable", tmp_path / "pulled").verify()


def test_files_are_removed_after_their_version(any_store: Store) -> None:
    """The first run marks, later ones remove what is garbage still."""
    first = collect(any_store, "tiny", replace(NOW, grace_s=DAY_S))
    assert by_kind(first, "versions", removed=False) == {"tiny:1", "tiny:2", "tiny:3"}
    assert not any(item.removed for item in first)
    any_store.promote("tiny:2", "prod")
    later = replace(NOW, grace_s=DAY_S, now=NOW.now + 2 * DAY_S)
    second = collect(any_store, "tiny", later)
    assert by_kind(second, "versions", removed=True) == {"tiny:1", "tiny:3"}
    assert any_store.versions("tiny") == [2, 4, 5]
    if any_store.registry is None:
        blobs = by_kind(second, "blobs", removed=False)
        assert len(blobs) >= 2
        third = collect(any_store, "tiny", replace(later, now=NOW.now + 4 * DAY_S))
        assert blobs <= by_kind(third, "blobs", removed=True)
        for day in (6, 8):  # the notes were written again
            last = collect(any_store, "tiny", replace(later, now=NOW.now + day * DAY_S))
        assert not last
    assert is_whole(any_store)


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    store = filled(Store.open(str(tmp_path / "store"), create=True), tmp_path)

    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}

    before = state()
    found = collect(store, "tiny", replace(NOW, dry_run=True))
    assert by_kind(found, "versions", removed=True) == {"tiny:1", "tiny:2", "tiny:3"}
    assert state() == before


def test_marked_blobs_that_are_published_again_stay(tmp_path: Path) -> None:
    store = filled(Store.open(str(tmp_path / "store"), create=True), tmp_path)
    collect(store, "tiny", NOW)
    marking = replace(NOW, grace_s=DAY_S)
    assert by_kind(collect(store, "tiny", marking), "blobs", removed=False) == set()
    store = filled(Store.open(str(tmp_path / "other"), create=True), tmp_path / "again")
    for number in (1, 2, 3):
        store.layout("tiny").retag({str(number): None})
    assert by_kind(collect(store, "tiny", marking), "blobs", removed=False)
    content = Artifact.read(tmp_path / "again" / "made-1")
    store.publish("tiny", source_key="again", artifacts=[content])
    later = replace(marking, now=NOW.now + 2 * DAY_S)
    assert by_kind(collect(store, "tiny", later), "blobs", removed=True)
    assert is_whole(store)


def test_damaged_models_stay_as_they_are(tmp_path: Path) -> None:
    store = filled(Store.open(str(tmp_path / "store"), create=True), tmp_path)
    index = store.version("tiny:4").descriptor.digest.removeprefix("sha256:")
    flip_a_byte(store.root / "tiny" / "blobs" / "sha256" / index)
    before = set(store.root.rglob("*"))
    with pytest.raises(IntegrityError):
        collect(store, "tiny", NOW)
    assert set((store.root / "tiny").rglob("*")) <= before
    assert len(list((store.root / "tiny" / "blobs" / "sha256").iterdir())) >= 20


def test_several_at_once_leave_whole_versions(any_store: Store, tmp_path: Path) -> None:
    """Beside a publisher, too."""
    extra = write_plain_artifact(tmp_path / "extra", b"\x01" * 1000)

    def publish() -> None:
        any_store.publish("tiny", source_key="extra", artifacts=[extra])

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(collect, Store.open(any_store.uri), "tiny", NOW) for _ in range(2)]
        calls.append(pool.submit(publish))  # type: ignore[arg-type]
        for call in calls:
            call.result()
    assert 6 in any_store.versions("tiny")
    assert is_whole(any_store)


KILLED = """
import os, signal, sys
from freezer.store import Cleaning, LocalFiles, Store, collect
num_left, remove = int(sys.argv[2]), LocalFiles.remove
def killed(self, path):
    global num_left
    num_left -= 1
    if num_left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    remove(self, path)
LocalFiles.remove = killed
collect(Store.open(sys.argv[1]), "tiny", Cleaning(keep=1, grace_s=0.0))
"""


@pytest.mark.parametrize("num_removed", [0, 3])
def test_a_killed_run_is_continued(tmp_path: Path, num_removed: int) -> None:
    store = filled(Store.open(str(tmp_path / "store"), create=True), tmp_path)
    done = finished(sys.executable, "-c", KILLED, store.uri, num_removed)
    assert done.returncode == -signal.SIGKILL
    assert store.versions("tiny") == [4, 5]
    assert is_whole(store)
    assert by_kind(collect(store, "tiny", NOW), "blobs", removed=True)
    assert not collect(store, "tiny", NOW)
    assert is_whole(store)


def refuse_deletes(method: str, *_: object) -> Answer | None:
    return Answer(405, {}, b'{"errors": []}') if method == "DELETE" else None


def test_registries_that_do_not_delete_say_so(front: Front, tmp_path: Path) -> None:
    store = filled(Store.open(front.uri("store")), tmp_path)
    front.before = refuse_deletes
    with pytest.raises(UsageError):
        collect(store, "tiny", NOW)
    assert store.versions("tiny") == [1, 2, 3, 4, 5]
    assert is_whole(store)
