"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter: the way out of a legacy fleet.

The converter is no public interface. It takes no `if` on sizes, no loop over a number that is not constant, and no state.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import EagerAnswers
from freezer.freezing.capture.export import DIMS, export_flat
from freezer.freezing.capture.program import Captured, Flat
from freezer.freezing.diagnostics.source_lines import line_of_node
from freezer.freezing.models.exported_program import module_of
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.torchscript_module import flat_forward, variable_of
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.pytree import leaves_of
from freezer.spec.inputs import InputSpec

NOTE = "The program was made of TorchScript by PyTorch's converter"
HELD = ", and answers as the TorchScript does on every input set"


class ConvertedModule(Flat):
    """A converted program, called with its tensors in order, giving its output tensors as a tuple."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.model = module_of(program)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        return self.laid_out(leaves_of(self.model(*tensors)))


def convert(subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]) -> Captured:
    """The exported program of a TorchScript source.

    Raises:
        CaptureError: this torch has no converter, it does not take the graph, what it makes cannot be exported for the declared
            sizes, or differs from the source.
    """
    converter = _converter()
    example = subject.set_at(point if point is not None else max(subject.spec.points(), key=lambda sizes: sum(sizes.values())))
    source = cast(torch.jit.ScriptModule, subject.model)
    try:
        with _quietly():
            source = _apart(subject.fresh())
            flat = flat_forward(source, subject.spec)
            program = converter(flat, tuple(example.cloned().values()), {}).convert()
    except Exception as error:
        raise CaptureError(f"PyTorch's converter: {_sentence(error, source)}") from error
    try:
        with _quietly():
            captured = export_flat(lambda: ConvertedModule(program).eval(), "convert", subject, point, eager)
    except CaptureError as error:
        guard = str(error.__cause__).strip().partition("\n")[0]
        if isinstance(error.__cause__, AssertionError) and guard.startswith("Guard failed: "):
            sizes = _named(guard.removeprefix("Guard failed: "), subject.spec)
            why = f"PyTorch's converter makes a program of fixed sizes, {sizes}, since forward asks for a size"
            raise CaptureError(why, code=DIMS) from error.__cause__
        raise
    note = f"{NOTE}{HELD if eager().deterministic else ''}."
    return replace(captured, notes=(*captured.notes, note))


def _apart(module: nn.Module) -> torch.jit.ScriptModule:
    """A copy that shares no graph with the module, as a deep copy does: the converter writes into graphs."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return cast(torch.jit.ScriptModule, torch.jit.load(file).eval())


def _converter() -> Any:
    try:
        return importlib.import_module("torch._export.converter").TS2EPConverter
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"torch {torch.__version__} has no converter of TorchScript to exported programs") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence what the converter says of its own work."""
    log = logging.getLogger("torch._export")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _sentence(error: BaseException, module: torch.jit.ScriptModule) -> str:
    """What was not converted: the innermost node of the graph that is named, the user's line, and why, which is in the cause."""
    node, said = None, ""
    cause: BaseException | None = error
    while cause is not None:
        lines = str(cause).strip().splitlines() or ["no message"]
        found = re.fullmatch(r"TS2EPConverter failed for node (\S+)", lines[0])
        node, said = (found[1], "") if found else (node, f"{type(cause).__name__}: {lines[0].rstrip('.')}")
        cause = cause.__cause__
    if node is None:
        return said
    graph: Any = module.inlined_graph  # held: its nodes die with it
    first = graph.findNode(node, True)
    where = first and line_of_node(first.sourceRange())
    return f"it does not take {node}" + (f" at {where}" if where else "") + (f" ({said})" if said else "")


def _named(guard: str, spec: InputSpec) -> str:
    """A guard of a converted program, with the names of inputs."""
    for item in spec.tensors:
        guard = re.sub(rf"\b{variable_of(item.name)}(_\d+)?\.size\(\)\[(\d+)\]", rf"{item.name}.shape[\2]", guard)
    return guard
