"""Payloads: the loader of each kind, and the choice of the payload that serves a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freezer.artifact.manifest import Payload, PayloadKind
from freezer.artifact.payload_selection import is_exact, serving, set_within
from freezer.errors import ContractError, IntegrityError
from freezer.runtime.devices import CPU
from freezer.runtime.inductor_loader import open_inductor
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.onnxruntime_loader import open_onnxruntime
from freezer.runtime.pt2_archives import code_in
from freezer.runtime.tensors import program_tensors


def open_exported(
    path: Path, settings: Mapping[str, Any], device: torch.device = CPU, *, one_at_a_time: bool = False
) -> Callable[..., Any]:
    """Open a program on a device.

    Programs are stored on the CPU or on the first GPU, and then moved to the device.

    Raises:
        IntegrityError: the file would run code when torch opens it.
    """
    if found := code_in(path):
        raise IntegrityError(
            f"{path} contains {found}, which torch would run when it opens the file; Coldpress writes no such file"
        )
    module: Callable[..., Any] = _moved(torch.export.load(str(path)), device).module()
    return module


def on_first(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """The program as stored: a GPU program on the first GPU, which every process with a GPU has."""
    return program if device.type != "cuda" else _moved(program, torch.device("cuda", 0))


def _moved(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    from torch.export.passes import move_to_device_pass

    tensors = (*program_tensors(program), *pytree.tree_leaves(program.example_inputs))
    source = next((tensor.device for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda), CPU)
    return program if source == device else move_to_device_pass(program, {str(source): str(device)})


def open_torchscript(
    path: Path, settings: Mapping[str, Any], device: torch.device = CPU, *, one_at_a_time: bool = False
) -> Callable[..., Any]:
    """Open a file on a device; `optimize_for_inference`, which torch.jit cannot save, is applied here.

    The module is saved in eval mode. Do not call `eval()`: it would add an attribute `training`, so that
    torch.jit.optimize_for_inference freezes the module again and drops preserved names.

    Raises:
        RuntimeError: the file is not TorchScript, or torch.jit.optimize_for_inference fails on this machine.
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
        A runner. For a `flat` payload it takes the tensor inputs in the manifest's order and returns the output tensors in order;
        for a `native` payload it is called like the source model.
    """

    def __call__(
        self, path: Path, settings: Mapping[str, Any], device: torch.device = ..., *, one_at_a_time: bool = ...
    ) -> Callable[..., Any]:
        """Open a payload."""


LOADERS: Mapping[PayloadKind, PayloadLoader] = {
    "torchscript": open_torchscript,
    "inductor": open_inductor,
    "exported": open_exported,
    "onnxruntime": open_onnxruntime,
}


@dataclass(frozen=True, kw_only=True)
class OpenPayload:
    """A payload and its runner."""

    payload: Payload
    run: Callable[..., Any]


class PayloadChoice:
    """Chooses the payload that serves a call by its sizes: one for exactly these sizes, else the first that accepts them.

    Args:
        payloads: open payloads for one thread count, or for any.
        dims: names of the declared dims.
        held: all payloads of the artifact, for `payload_for` with a thread count.
    """

    def __init__(self, payloads: Sequence[OpenPayload], dims: Sequence[str], held: Sequence[Payload]) -> None:
        self._payloads = tuple(payloads)
        self._dims = tuple(dims)
        self._held = tuple(held)
        self._exact: dict[tuple[int, ...], OpenPayload] = {}
        for opened in payloads:
            sizes = {dim.name: dim.min for dim in opened.payload.dims}
            if is_exact(opened.payload) and set(sizes) == set(dims):
                self._exact.setdefault(tuple(sizes[name] for name in dims), opened)

    def choose(self, point: Mapping[str, int]) -> OpenPayload:
        """The open payload that serves these sizes.

        Raises:
            ContractError: none does.
        """
        exact = self._exact.get(tuple(point[name] for name in self._dims))
        if exact is not None:
            return exact
        for opened in self._payloads:
            if opened.payload.accepts(point):
                return opened
        raise ContractError(f"no payload serves {dict(point)}; {_listed([opened.payload for opened in self._payloads])}")

    def payload_for(self, shape: Mapping[str, int], threads: int | None) -> Payload:
        """See `FrozenModel.payload_for`."""
        if set(shape) != set(self._dims):
            expected = f"those of {', '.join(self._dims)}" if self._dims else "{}: the model declares no dim"
            raise ContractError(f"got sizes of {sorted(shape)}, expected {expected}")
        if threads is None:
            return self.choose(shape).payload
        found = serving(set_within(self._held, threads), shape)
        if found is None:
            raise ContractError(f"no payload serves {dict(shape)} with {threads} threads; {_listed(self._held)}")
        return found


def _listed(payloads: Sequence[Payload]) -> str:
    sizes = {payload.path: ", ".join(str(dim) for dim in payload.dims) for payload in payloads}
    return "the artifact holds " + "; ".join(f"{path} ({text})" if text else path for path, text in sizes.items())
