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
    """A runner of the program, on a device. The file is unpickled in part: its digest must have been verified.

    What is made for GPUs is read onto the first one that the process sees, and then moved to its own; so is a portable program.
    """
    program = torch.export.load(str(path))
    source = _stored_on(program)
    if source != device:
        program = _moved(program, source, device)
    module: Callable[..., Any] = program.module()
    return module


def _stored_on(program: torch.export.ExportedProgram) -> torch.device:
    """The GPU that a stored program's tensors lie on, or the CPU."""
    return next((tensor.device for tensor in (*program_tensors(program), *_examples(program)) if tensor.is_cuda), CPU)


def _examples(program: torch.export.ExportedProgram) -> list[Tensor]:
    args, kwargs = program.example_inputs or ((), {})
    return [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]


def on_first(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """The program as it is stored: of a GPU, on the first one, which every process with a GPU has."""
    return program if device.type != "cuda" or device == _FIRST else _moved(program, device, _FIRST)


def _moved(program: torch.export.ExportedProgram, source: torch.device, dest: torch.device) -> torch.export.ExportedProgram:
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, {str(source): str(dest)})
