"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter: the way out of a legacy fleet.

The converter is no public interface. It takes no `if` on sizes, no loop over a number that is not constant, and no state.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from freezer.captured import Captured
from freezer.errors import CaptureError
from freezer.exported_module import module_of
from freezer.exporting import export_flat
from freezer.faithful import EagerAnswers
from freezer.legacy import torchscript_deprecations_silenced
from freezer.outputs import leaves_of
from freezer.subject import Subject
from freezer.torchscript_graph import flat_forward


class ConvertedModule(nn.Module):
    """A converted program, called with its tensors in order, giving its output tensors as a tuple."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.model = module_of(program)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        return tuple(leaves_of(self.model(*tensors)))


def convert(subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]) -> Captured:
    """The exported program of a TorchScript source.

    Raises:
        CaptureError: this torch has no converter, it does not take the graph, what it makes cannot be exported for the declared
            sizes, or differs from the source.
    """
    converter = _converter()
    example = subject.set_at(point if point is not None else max(subject.spec.points(), key=lambda sizes: sum(sizes.values())))
    try:
        with _quietly():
            flat = flat_forward(cast(torch.jit.ScriptModule, subject.fresh()), subject.spec)
            program = converter(flat, tuple(example.cloned().values()), {}).convert()
    except Exception as error:
        raise CaptureError(f"the converter: {_sentence(error)}") from error
    with _quietly():
        return export_flat(ConvertedModule(program).eval(), "convert", subject, point, eager)


def _converter() -> Any:
    try:
        return importlib.import_module("torch._export.converter").TS2EPConverter
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"torch {torch.__version__} has no converter of TorchScript to exported programs") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence what the converter says of its own work."""
    log = logging.getLogger("torch._export.converter")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"
