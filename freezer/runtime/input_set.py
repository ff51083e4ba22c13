"""One set of tensor inputs, on a device and at a point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freezer.runtime.devices import tensors_on
from freezer.spec.inputs import InputSpec


def on_device(item: InputSet, device: torch.device) -> InputSet:
    """An input set with its tensors on a device."""
    return replace(item, tensors=tensors_on(item.tensors, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSet:
    """One set of tensor inputs by name, in the order of the spec, and the sizes of the named dims in it."""

    point: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def cloned(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a call that may write into its inputs."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def resize(item: InputSet, spec: InputSpec, point: Mapping[str, int]) -> InputSet:
    """An input set at another point: rows of the named dims are taken in order, from the start again when they run out."""
    tensors = dict(item.tensors)
    for declared in spec.tensors:
        tensor = tensors[declared.name]
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and tensor.shape[axis] != point[size]:
                tensor = tensor.index_select(axis, torch.arange(point[size]) % tensor.shape[axis])
        tensors[declared.name] = tensor.contiguous()
    return InputSet(point=dict(point), tensors=tensors)
