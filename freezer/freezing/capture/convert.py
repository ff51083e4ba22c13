"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter.

The converter is not a public interface. It takes no `if` on sizes, no loop over a variable number, and no state.
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
from torch import Tensor

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.equivalence import EagerAnswers
from freezer.freezing.capture.export import DIMS, export_flat
from freezer.freezing.capture.program import Captured, Flat
from freezer.freezing.diagnostics.source_lines import line_of_node
from freezer.freezing.models.exported_program import module_of
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.torchscript_module import flat_forward, variable_of
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.pytree import leaves_of


class ConvertedModule(Flat):
    """The flat form of a converted program."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.model = module_of(program)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        return self.laid_out(leaves_of(self.model(*tensors)))


def convert(subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]) -> Captured:
    """Convert a TorchScript source to an exported program.

    Raises:
        CaptureError: this torch has no converter, the converter does not take the graph, or its program cannot be exported for the
            declared sizes, or differs from the source.
    """
    try:
        converter = importlib.import_module("torch._export.converter").TS2EPConverter
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"torch {torch.__version__} has no converter from TorchScript to exported programs") from error
    example = subject.set_at(point if point is not None else max(subject.spec.points(), key=lambda sizes: sum(sizes.values())))
    source = cast(torch.jit.ScriptModule, subject.model)
    try:
        with _quietly():
            source = _reloaded(subject)
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
            sizes = guard.removeprefix("Guard failed: ")
            for item in subject.spec.tensors:
                sizes = re.sub(rf"\b{variable_of(item.name)}(_\d+)?\.size\(\)\[(\d+)\]", rf"{item.name}.shape[\2]", sizes)
            why = f"PyTorch's converter makes a program of fixed sizes, {sizes}, since forward asks for a size"
            raise CaptureError(why, code=DIMS) from error.__cause__
        raise
    compared = "; its answers match the source's on every input set" if eager().deterministic else ""
    note = f"PyTorch's converter made the program from TorchScript{compared}."
    return replace(captured, notes=(*captured.notes, note))


def _reloaded(subject: Subject) -> torch.jit.ScriptModule:
    """A copy whose graph is not shared with the source, unlike a deep copy's: the converter writes into graphs."""
    file = io.BytesIO()
    torch.jit.save(subject.fresh(), file)
    file.seek(0)
    return cast(torch.jit.ScriptModule, torch.jit.load(file).eval())


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the converter's log and warnings."""
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
    """Describe a failed conversion: the innermost node that it names, the user's line, and the reason, from the causes."""
    node, said = None, ""
    cause: BaseException | None = error
    while cause is not None:
        first = first_line(cause)
        found = re.fullmatch(r"TS2EPConverter failed for node (\S+)", first)
        node, said = (found[1], "") if found else (node, f"{type(cause).__name__}: {first.rstrip('.')}")
        cause = cause.__cause__
    if node is None:
        return said
    graph: Any = module.inlined_graph  # keep a reference: its nodes die with it
    first_node = graph.findNode(node, True)
    where = first_node and line_of_node(first_node.sourceRange())
    return f"it does not take {node}" + (f" at {where}" if where else "") + (f" ({said})" if said else "")
