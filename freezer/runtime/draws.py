"""Random numbers from a seed, with the same bits on every platform and with every torch.

torch's own differ: it fills tensors by formulas that depend on the instructions of the CPU. Here
all are made of the integers of NumPy's PCG64DXSM, a stream that NumPy never changes, by operations
that IEEE 754 rounds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**14
"""Numbers that are made at once, so that intermediate results stay in the CPU's cache."""


class Draws(np.random.PCG64DXSM):
    """A stream of random numbers from a seed."""

    def integers(self, low: int, beyond: int, shape: Sequence[int]) -> Tensor:
        """Integers from `low` to `beyond` - 1, int64."""
        offsets = self.random_raw(math.prod(shape)) % np.uint64(beyond - low)
        return torch.from_numpy(offsets.view(np.int64) + np.int64(low)).view(tuple(shape))

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Nearly standard normal numbers below 6, float32: each is the sum of twelve uniform ones,
        whose variances are 1/12.
        """
        values = torch.empty(tuple(shape), dtype=torch.float32)
        for part in values.view(-1).split(CHUNK):
            total = np.zeros(len(part))
            for _ in range(6):
                raw = self.random_raw(len(part))
                total += (raw >> 32) + (raw & (2**32 - 1))
            part.numpy()[:] = (total - 6 * (2.0**32 - 1)) * 2.0**-32
        return values
