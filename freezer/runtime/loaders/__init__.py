"""Loaders: open a payload of each kind, to call it with tensors. No loader needs a compiler.

A loader takes the payload file, the recipe's settings that the payload was made with, and the
device to run on. It returns a runner: for a `flat` payload a function of the tensor inputs in the
manifest's order that returns the output tensors in order; for a `native` payload it is called like
the source model.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from freezer.artifact import PayloadKind
from freezer.runtime.arrays import readable
from freezer.runtime.contract import Runner
from freezer.runtime.devices import CPU
from freezer.runtime.loaders.exported import LEGACY, code_in, on_first, open_exported
from freezer.runtime.loaders.inductor import one_warning, open_inductor
from freezer.runtime.native import ENGINE_OPENERS, EngineOpener
from freezer.runtime.tensors import addresses_of, program_tensors, to_array, to_tensor

__all__ = [
    "LEGACY",
    "LOADERS",
    "PayloadLoader",
    "code_in",
    "on_first",
    "one_warning",
    "open_inductor",
    "own_memory",
    "torchscript_deprecations_silenced",
]


@contextlib.contextmanager
def torchscript_deprecations_silenced() -> Iterator[None]:
    """Silence only notices that TorchScript is deprecated."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings(
                "ignore",
                message=r".*torch\.jit\.",
                category=category,
            )
        yield


def open_torchscript(
    path: Path,
    settings: Mapping[str, object],
    device: torch.device = CPU,
) -> Runner:
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
            others = {*module._c._method_names()} - {"forward"}
            module = torch.jit.optimize_for_inference(module, other_methods=sorted(others))
    runner: Runner = module
    return runner


class PayloadLoader(Protocol):
    """A loader."""

    def __call__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        device: torch.device = ...,
    ) -> Runner:
        """Open a payload."""


def _of_engine(open_engine: EngineOpener) -> PayloadLoader:
    """The loader of an engine's payloads.

    They are opened for torch's thread count in this thread, which stays when torch's changes later.
    Outputs are new tensors, which share no memory with the inputs, and have eager's order of dims
    in memory.
    """

    def open_payload(path: Path, settings: Mapping[str, Any], device: torch.device = CPU) -> Runner:
        run = open_engine(path, settings, torch.get_num_threads())

        def call(*tensors: Tensor) -> list[Tensor]:
            arrays = [readable(to_array(tensor)) for tensor in tensors]
            return [to_tensor(array) for array in run(arrays)]

        return call

    return open_payload


LOADERS: Mapping[PayloadKind, PayloadLoader] = {
    "torchscript": open_torchscript,
    "inductor": open_inductor,
    "exported": open_exported,
    "onnxruntime": _of_engine(ENGINE_OPENERS["onnxruntime"]),
    "openvino": _of_engine(ENGINE_OPENERS["openvino"]),
}


def own_memory(run: Runner) -> set[int]:
    """Addresses of the tensors that an open payload keeps: a result there must be copied, or its
    owner could change the model.
    """
    if isinstance(run, torch.jit.ScriptModule):
        graph: Any = run.graph
        constants = graph.findAllNodes("prim::Constant", recurse=True)
        kept = [
            node.t("value") for node in constants if "t" in map(node.kindOf, node.attributeNames())
        ]
        return addresses_of([*program_tensors(run), *kept])
    if isinstance(run, torch.nn.Module):
        return addresses_of(program_tensors(run))
    state = run.args if isinstance(run, functools.partial) else ()
    return addresses_of([tensor for tensor in state if isinstance(tensor, torch.Tensor)])
