"""Fixtures of the tests on a GPU; all of them are skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freezer.runtime.devices import no_cuda, visible


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them with the reason if there is no GPU."""
    here = Path(__file__).parent
    mine = [item for item in items if here in Path(str(item.path)).parents]
    why = no_cuda() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    return visible()[0][0]


@pytest.fixture(scope="session")
def gpu_class() -> str:
    """The device class of the first GPU."""
    return f"cuda-sm{visible()[0][1]}"
