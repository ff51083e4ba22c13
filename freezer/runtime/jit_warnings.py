"""Silence torch.jit's deprecation notices.

Coldpress uses torch.jit on purpose: existing fleets are TorchScript. Inductor's own modules use it
too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def torchscript_deprecations_silenced() -> Iterator[None]:
    """Silence only notices that TorchScript is deprecated."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=category)
        yield
