"""Names of versions: what they point at, who moved them, and which keys a canary serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.errors import NotPublishedError, UsageError
from freezer.store import Move, Store


@pytest.fixture
def any_store(anywhere: Store, one: Artifact, two: Artifact) -> Store:
    anywhere.publish("tiny", source_key="1", artifacts=[one])
    anywhere.publish("tiny", source_key="2", artifacts=[one, two])
    return anywhere


def moved(store: Store) -> list[tuple[str, int, int, float | None]]:
    return [(m.name, m.before, m.version, m.share) for m in store.notes("tiny").moves]


def test_names_move_and_are_noted(any_store: Store) -> None:
    any_store.promote("tiny:1", "prod")
    assert any_store.version("tiny:prod").number == 1
    any_store.promote("tiny:2", "prod")
    any_store.promote("tiny", "prod")  # where it is
    any_store.roll_back("tiny", 1)
    any_store.promote("tiny", "prod", remove=True)
    expected = [("prod", 0, 1, None), ("prod", 1, 2, None), ("latest", 2, 1, None)]
    assert moved(any_store) == [*expected, ("prod", 2, 0, None)]
    assert all("@" in move.by and move.time > 1e9 for move in any_store.notes("tiny").moves)
    with pytest.raises(NotPublishedError):
        any_store.version("tiny:prod")
    with pytest.raises(UsageError):
        any_store.promote("tiny", "prod", remove=True)


def test_canaries_serve_their_share_of_keys(any_store: Store) -> None:
    any_store.promote("tiny:1", "prod")
    assert any_store.version("tiny:prod", "user").number == 1
    keys = [f"user-{index}" for index in range(60)]

    def chosen(share: float) -> set[str]:
        any_store.promote("tiny:2", "prod-canary", share=share)
        return {key for key in keys if any_store.version("tiny:prod", key).number == 2}

    few, many = chosen(0.2), chosen(0.6)
    assert few < many
    assert (len(few), len(many)) == (12, 32)
    assert (chosen(0.0), chosen(1.0)) == (set(), set(keys))
    assert any_store.version("tiny:prod").number == 1


def test_a_move_is_taken_back_unless_moved_again(any_store: Store) -> None:
    any_store.promote("tiny:1", "prod")
    second = any_store.promote("tiny:2", "prod")
    any_store.take_back("tiny", second)
    assert any_store.version("tiny:prod").number == 1
    assert moved(any_store) == [("prod", 0, 1, None)]
    any_store.promote("tiny:2", "prod")
    any_store.take_back("tiny", second)
    assert any_store.version("tiny:prod").number == 2
    new: Move = any_store.promote("tiny:1", "new")
    any_store.take_back("tiny", new)
    assert any_store.find("tiny:new") is None


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *[("latest", None), ("before-rollback", None), ("portable", None), ("v2", None)],
        *[("3", None), ("Prod", None), ("a.b", None), ("_notes", None)],
        *[("prod", 0.1), ("prod-canary", None), ("prod-canary", 1.5), ("prod-canary", -0.1)],
    ],
)
def test_names_that_cannot_be_used(tmp_path: Path, one: Artifact, name: str, share: float) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="1", artifacts=[one])
    with pytest.raises(UsageError):
        store.promote("tiny:1", name, share=share)
    assert not store.notes("tiny").moves
