"""Setting torch's thread count for a block: put back whatever happens, and from several Python threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from freezer.runtime.threads import own_count, threads

BEFORE = torch.get_num_threads()
T = TypeVar("T")


def in_a_new_thread(ask: Callable[[], T]) -> T:
    """What a thread answers that never used torch before."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(ask).result(timeout=60)


def test_a_count_is_put_back_even_after_an_error() -> None:
    with threads(BEFORE + 1):
        assert torch.get_num_threads() == own_count() == BEFORE + 1
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == BEFORE + 1
    with pytest.raises(RuntimeError, match="shape"), threads(BEFORE + 1):
        torch.zeros(2).reshape(3)
    assert torch.get_num_threads() == BEFORE


def test_the_count_of_torch_belongs_to_the_thread_that_sets_it() -> None:
    """What the module rests on; were it the process's, calls from several threads would need a lock."""
    inside, done = threading.Event(), threading.Event()

    def other() -> int:
        before = torch.get_num_threads()
        inside.set()
        assert done.wait(60)
        assert torch.get_num_threads() == before
        return before

    with ThreadPoolExecutor(max_workers=1) as pool:
        found = pool.submit(other)
        assert inside.wait(60)
        with threads(BEFORE + 2):
            done.set()
            assert found.result(timeout=60) == BEFORE


def test_many_threads_set_counts_of_their_own_at_the_same_time() -> None:
    start = threading.Barrier(6)

    def work(count: int) -> list[tuple[int, int]]:
        own = torch.get_num_threads()
        start.wait(60)
        seen = []
        for _ in range(200):
            with threads(count):
                seen.append((count, torch.get_num_threads()))
            seen.append((own, torch.get_num_threads()))
        return seen

    with ThreadPoolExecutor(max_workers=6) as pool:
        for seen in pool.map(work, [1, 2, 3, 4, 5, 6]):
            assert all(expected == got for expected, got in seen)
    assert torch.get_num_threads() == BEFORE
    assert in_a_new_thread(torch.get_num_threads) == BEFORE, "what new threads start with is as it was too"


def test_a_thread_that_starts_within_a_block_of_another_does_not_keep_its_count() -> None:
    with threads(BEFORE + 3):
        assert in_a_new_thread(torch.get_num_threads) == BEFORE + 3, (
            "torch hands on what was set last; else nothing is to be mended"
        )

        def work() -> tuple[int, int, int]:
            first = own_count()
            with threads(BEFORE + 3):
                inside = torch.get_num_threads()
            return first, inside, torch.get_num_threads()

        assert in_a_new_thread(work) == (BEFORE, BEFORE + 3, BEFORE)
        assert torch.get_num_threads() == BEFORE + 3, "the block under way is left alone"
    assert torch.get_num_threads() == BEFORE


@pytest.mark.parametrize(("own", "used"), [(1, False), (BEFORE + 5, False), (BEFORE + 3, True), (1, True)])
def test_a_count_that_a_thread_set_itself_is_its_own(own: int, used: bool) -> None:
    """Once it has used torch, also where it is the very count of a block that is under way elsewhere."""

    def work() -> list[int]:
        torch.set_num_threads(own)
        if used:
            assert torch.get_num_threads() == own
        seen = [own_count()]
        with threads(BEFORE + 4):
            pass
        return [*seen, torch.get_num_threads()]

    try:
        with threads(BEFORE + 3):
            assert in_a_new_thread(work) == [own, own]
    finally:
        torch.set_num_threads(BEFORE)  # what new threads start with was changed by that thread
