"""Blocks with a thread count: restored after errors, and from several Python threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from freezer.runtime.torch_settings import own_count, threads

BEFORE = torch.get_num_threads()
T = TypeVar("T")


def in_a_new_thread(ask: Callable[[], T]) -> T:
    """Result of a call in a thread that has not used torch before."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(ask).result(timeout=60)


def test_the_count_is_restored_after_an_error() -> None:
    with threads(BEFORE + 1):
        assert torch.get_num_threads() == own_count() == BEFORE + 1
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == BEFORE + 1
    with pytest.raises(RuntimeError, match="shape"), threads(BEFORE + 1):
        torch.zeros(2).reshape(3)
    assert torch.get_num_threads() == BEFORE


def test_many_threads_set_their_own_counts() -> None:
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
    assert in_a_new_thread(torch.get_num_threads) == BEFORE


@pytest.mark.parametrize(
    ("own", "used"), [(None, False), (1, False), (BEFORE + 5, False), (BEFORE + 3, True)]
)
def test_a_threads_own_count_is_kept(own: int | None, used: bool) -> None:
    """Also if it equals the count of a block in another thread; a new thread has the process's."""

    def work() -> list[int]:
        if own is not None:
            torch.set_num_threads(own)
        if used:
            assert torch.get_num_threads() == own
        seen = [own_count()]
        with threads(BEFORE + 4):
            pass
        return [*seen, torch.get_num_threads()]

    try:
        with threads(BEFORE + 3):
            assert in_a_new_thread(work) == [own or BEFORE] * 2
    finally:
        torch.set_num_threads(BEFORE)  # that thread changed what new threads inherit
