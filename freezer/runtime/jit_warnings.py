"""The one place where torch.jit's own deprecation is silenced.

torch.jit.trace, script, freeze and load say that they are deprecated in favour of torch.export. Coldpress uses them on purpose:
they are how existing fleets are frozen. Inductor's own modules use it too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def torchscript_deprecations_silenced() -> Iterator[None]:
    """Silence torch.jit's notices that TorchScript is deprecated, and nothing else."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=category)
        yield
