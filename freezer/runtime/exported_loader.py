"""Open payloads of torch.export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.runtime.devices import CPU
from freezer.runtime.tensor_memory import program_tensors

_FIRST = torch.device("cuda", 0)


def open_exported(
    path: Path, settings: Mapping[str, Any], device: torch.device = CPU, *, one_at_a_time: bool = False
) -> Callable[..., Any]:
    """Open a program on a device. Parts of the file are unpickled: verify its digest first.

    Programs are stored on the CPU or on the first GPU, and then moved to the device.
    """
    program = torch.export.load(str(path))
    source = _stored_on(program)
    if source != device:
        program = _moved(program, source, device)
    module: Callable[..., Any] = program.module()
    return module


def _stored_on(program: torch.export.ExportedProgram) -> torch.device:
    """Device of a stored program's tensors."""
    tensors = (*program_tensors(program), *pytree.tree_leaves(program.example_inputs))
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda), CPU)


def on_first(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """The program as stored: a GPU program on the first GPU, which every process with a GPU has."""
    return program if device.type != "cuda" or device == _FIRST else _moved(program, device, _FIRST)


def _moved(program: torch.export.ExportedProgram, source: torch.device, dest: torch.device) -> torch.export.ExportedProgram:
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, {str(source): str(dest)})
