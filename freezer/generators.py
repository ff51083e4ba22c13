"""The caller's random numbers: they go on as if nothing had been drawn meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators of torch (on the CPU), Python and NumPy back. Models draw from them, and compilers do.

    NumPy's is kept where something has imported NumPy already.
    """
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
