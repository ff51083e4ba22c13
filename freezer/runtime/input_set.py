"""One set of tensor inputs, on a device and at a point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freezer.runtime.devices import tensors_on
from freezer.spec.inputs import InputSpec


def on_device(item: InputSet, device: torch.device) -> InputSet:
    """Move an input set to a device."""
    return replace(item, tensors=tensors_on(item.tensors, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSet:
    """One set of tensor inputs by name, in the order of the spec, and the sizes of the named dims in it."""

    point: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def cloned(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a call that may modify its inputs."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def resize(item: InputSet, spec: InputSpec, point: Mapping[str, int]) -> InputSet:
    """Resize an input set to another point: rows of the named dims are cut or repeated in order."""
    tensors = dict(item.tensors)
    for declared in spec.tensors:
        tensor = tensors[declared.name]
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and tensor.shape[axis] != point[size]:
                tensor = tensor.index_select(axis, torch.arange(point[size]) % tensor.shape[axis])
        tensors[declared.name] = tensor.contiguous()
    return InputSet(point=dict(point), tensors=tensors)
