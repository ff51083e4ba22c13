"""Write the table that the Inductor loader reads: name, position, dtype, shape and stride of each constant."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freezer.codec import encode
from freezer.runtime.inductor_loader import ALIGNMENT, WeightEntry, WeightTable


def table_of(graph: Any) -> tuple[list[WeightEntry], int]:
    """The constants of Inductor's GraphLowering in the order and at the positions in which it writes them, and their total size."""
    entries, position = [], 0
    for name in graph.constants:
        if name in graph.folded_constants:
            continue
        tensor = graph.get_original_value_of_constant(name)
        packed = tensor.is_mkldnn
        entries.append(
            WeightEntry(
                name=name,
                position=position,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=() if packed else tuple(tensor.stride()),
                offset=0 if packed else tensor.storage_offset(),
                packed=_description(tensor) if packed else None,
            )
        )
        size = torch.ops.mkldnn._nbytes(tensor) if packed else tensor.untyped_storage().nbytes()
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return entries, position


def _description(tensor: Tensor) -> str:
    return base64.b64encode(bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).tolist())).decode()


def write_table(entries: Sequence[WeightEntry], size_bytes: int) -> str:
    """The content of TABLE."""
    return json.dumps(encode(WeightTable(size_bytes=size_bytes, constants=tuple(entries))))
