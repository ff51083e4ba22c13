"""The loader of each kind of payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from freezer.artifact import PayloadKind
from freezer.errors import IntegrityError
from freezer.runtime.devices import CPU
from freezer.runtime.inductor_loader import open_inductor
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.onnxruntime_loader import open_onnxruntime
from freezer.runtime.openvino_loader import open_openvino
from freezer.runtime.pt2_archives import code_in
from freezer.runtime.tensors import program_tensors


def open_exported(
    path: Path,
    settings: Mapping[str, Any],
    device: torch.device = CPU,
    *,
    one_at_a_time: bool = False,
) -> Callable[..., Any]:
    """Open a program on a device.

    Programs are stored on the CPU or on the first GPU, and then moved to the device.

    Raises:
        IntegrityError: the file would run code when torch opens it.
    """
    if found := code_in(path):
        raise IntegrityError(
            f"{path} contains {found}, which torch would run when it opens the file; Coldpress"
            " writes no such file"
        )
    program = _moved(torch.export.load(str(path)), device)
    runner: Callable[..., Any] = _graph_of(program) or program.module()
    return runner


def _graph_of(program: torch.export.ExportedProgram) -> Callable[..., Any] | None:
    """The program's graph as a function of its tensor inputs; None if it needs more than tensors,
    or returns more than results.

    Operations in place change the tensors of the program. A functionalized program returns changed
    state as such an output.

    `program.module()` checks the inputs again, in Python, and looks up each parameter by its path:
    0.2 ms a call for a small model.
    """
    signature, tensors = program.graph_signature, {**program.state_dict, **program.constants}
    given = [spec.kind is InputKind.USER_INPUT for spec in signature.input_specs]
    state = [
        tensors.get(spec.target)
        for spec, is_given in zip(signature.input_specs, given, strict=True)
        if not is_given
    ]
    if (
        any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs)
        or not all(isinstance(tensor, Tensor) for tensor in state)
        or given != sorted(given)
    ):
        return None
    return partial(program.graph_module.forward, *state)


def on_first(
    program: torch.export.ExportedProgram, device: torch.device
) -> torch.export.ExportedProgram:
    """The program as stored: a GPU program on the first GPU, which every process with a GPU has."""
    return program if device.type != "cuda" else _moved(program, torch.device("cuda", 0))


def _moved(
    program: torch.export.ExportedProgram, device: torch.device
) -> torch.export.ExportedProgram:
    from torch.export.passes import move_to_device_pass

    tensors = (*program_tensors(program), *pytree.tree_leaves(program.example_inputs))
    source = next(
        (tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda), CPU
    )
    return program if source == device else move_to_device_pass(program, {str(source): str(device)})


def open_torchscript(
    path: Path,
    settings: Mapping[str, Any],
    device: torch.device = CPU,
    *,
    one_at_a_time: bool = False,
) -> Callable[..., Any]:
    """Open a file on a device; `optimize_for_inference`, which torch.jit cannot save, is applied
    here.

    The module is saved in eval mode. Do not call `eval()`: it would add an attribute `training`, so
    that torch.jit.optimize_for_inference freezes the module again and drops preserved names.

    Raises:
        RuntimeError: the file is not TorchScript, or torch.jit.optimize_for_inference fails on this
            machine.
    """
    with torchscript_deprecations_silenced(), torch.no_grad():
        module = torch.jit.load(str(path), map_location=device)
        if settings.get("optimize_for_inference"):
            others = [name for name in module._c._method_names() if name != "forward"]
            module = torch.jit.optimize_for_inference(module, other_methods=sorted(others))
    runner: Callable[..., Any] = module
    return runner


class PayloadLoader(Protocol):
    """Open a payload. Needs no compiler.

    Args:
        path: the payload file.
        settings: the recipe's settings that the payload was made with.
        device: to run on.
        one_at_a_time: calls never overlap, as under a CUDA graph.

    Returns:
        A runner. For a `flat` payload it takes the tensor inputs in the manifest's order and
        returns the output tensors in order; for a `native` payload it is called like the source
        model.
    """

    def __call__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        device: torch.device = ...,
        *,
        one_at_a_time: bool = ...,
    ) -> Callable[..., Any]:
        """Open a payload."""


LOADERS: Mapping[PayloadKind, PayloadLoader] = {
    "torchscript": open_torchscript,
    "inductor": open_inductor,
    "exported": open_exported,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
}
