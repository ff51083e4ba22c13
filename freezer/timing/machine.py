"""What surrounds each timing, so that nothing else uses the machine meanwhile. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Alone = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that waits until this process has the machine alone."""

_alone: list[Alone] = [nullcontext]


def alone() -> AbstractContextManager[None]:
    """Have the machine alone, if this process shares it with others of Coldpress."""
    return _alone[-1]()


def share_machine(by: Alone) -> None:
    """Set how this process gets the machine alone; by default it takes it to be its own."""
    _alone[:] = [by]
