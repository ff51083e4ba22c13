"""What the tests on a GPU share. They need torch with CUDA, safetensors and archspec, and nothing else of this project's extras."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freezer.freezing.lowering.inductor.cuda_toolkit import driver_library
from freezer.runtime.cuda import no_cuda, visible


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them with the reason where there is no GPU."""
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


@pytest.fixture(scope="session")
def compiles() -> Callable[[str], None]:
    """Skips what needs a compiler on a machine that has none, and says which."""

    def check(recipe: str) -> None:
        if not recipe.startswith("inductor"):
            return
        lacking = [name for name in ("g++", "objdump") if shutil.which(name) is None]
        if lacking or driver_library() is None:
            pytest.skip(f"{recipe} needs {', '.join(lacking) or 'libcuda.so.1'} to build")

    return check
