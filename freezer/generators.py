"""The generators that models draw from: whether something was drawn, and the caller's put back as if nothing had been."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators of torch (on the CPU, and on GPUs that are in use), Python and NumPy back. Models draw from them, and
    compilers do.

    NumPy's is kept where something has imported NumPy already.
    """
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def positions() -> Any:
    """Where the generators of torch, Python and NumPy are: elsewhere after something was drawn. A model's own are not seen."""
    numpy = sys.modules.get("numpy")
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state())
    return [state.tolist() for state in of_torch], random.getstate(), of_numpy
