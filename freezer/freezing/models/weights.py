"""The digest of a model's weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def weights_digest(model: nn.Module) -> str:
    """`sha256:` over names, dtypes, shapes and bytes of all parameters, buffers and packed weights, in the order of their names."""
    from freezer.runtime.tensor_bytes import bytes_of, dense_parts, memory_of

    digest = hashlib.sha256()
    tensors = {**dict(model.named_buffers()), **model.state_dict()}  # state_dict leaves buffers out that are not persistent
    for name, value in sorted(tensors.items()):
        for tensor in dense_parts(value):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.numel():
                data = bytes_of(tensor)
                digest.update(memory_of(data))
    return f"sha256:{digest.hexdigest()}"
