"""Settings of the tests of the example catalogs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freezer.runtime.torch_settings import threads


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: nothing is timed here, and on a busy machine several threads spend their time
    in waiting for each other.
    """
    with threads(1):
        yield
