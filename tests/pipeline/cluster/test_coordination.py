"""Claims of campaigns that share a cluster, and drivers that died."""

from __future__ import annotations

from pipeline.cluster import Turns
from pipeline.cluster.coordination import HEARTBEAT_S, READ_S, SILENCE_S
from tests.support.boards import Clock, DictBoard


def beat(*drivers: tuple[Turns, Clock]) -> None:
    for turns, clock in drivers:
        clock.now += READ_S
        turns.tick()


def test_others_see_a_claim_until_its_release() -> None:
    board = DictBoard()
    ours = Clock()
    theirs = Clock(1e6)
    a = Turns(board, ours)
    b = Turns(board, theirs)
    beat((a, ours), (b, theirs), (a, ours))
    assert (a.others, b.others) == (True, True)
    a.claim("n1")
    beat((b, theirs))
    assert b.claimed("n1")
    assert not b.claimed("n2")
    assert not a.claimed("n1")
    a.release("n1")
    beat((b, theirs))
    assert not b.claimed("n1")
    a.close()
    beat((b, theirs))
    assert not b.others
    assert len(board.rows) == 1


def test_a_dead_driver_is_ignored_by_the_readers_clock() -> None:
    board = DictBoard()
    ours = Clock(5e5)
    theirs = Clock()
    dead = Turns(board, theirs)
    alive = Turns(board, ours)
    dead.claim("n1")
    beat((alive, ours))
    assert alive.claimed("n1")
    ours.now += SILENCE_S - READ_S
    beat((alive, ours))
    assert alive.claimed("n1")
    ours.now += 2 * READ_S
    beat((alive, ours))
    assert not alive.claimed("n1")
    assert not alive.others
    assert len(board.rows) == 1
    theirs.now += HEARTBEAT_S
    beat((dead, theirs), (alive, ours))
    assert alive.claimed("n1"), "it was slow, not dead"


def test_a_local_cluster_needs_no_board() -> None:
    turns = Turns(None)
    turns.claim("n1")
    turns.tick()
    turns.release("n1")
    turns.close()
    assert not turns.others
    assert not turns.claimed("n1")
