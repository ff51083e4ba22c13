"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter.

The converter is not a public interface. It takes no `if` on sizes, no loop over a variable number,
and no state.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.equivalence import Original
from freezer.freezing.capture.export import export_flat
from freezer.freezing.capture.program import Captured, FlatModule, total_size
from freezer.freezing.models import Subject, flat_forward, module_of
from freezer.runtime.loaders import torchscript_deprecations_silenced


def convert(original: Original) -> Captured:
    """Convert a TorchScript source to an exported program.

    Raises:
        CaptureError: the converter does not take the graph, or its program cannot be exported for
            the declared sizes, or differs from the source.
    """
    spec = original.subject.spec
    program = _converted(original)
    in_order = replace(spec, inputs=spec.tensors, style="positional")

    def fresh() -> FlatModule:
        module = FlatModule(module_of(program), in_order)
        module.eval()
        return module

    with _quiet():
        captured = export_flat(fresh, "convert", original)
    note = "PyTorch's converter made the program from TorchScript."
    return replace(captured, notes=(note,))


def _converted(original: Original) -> torch.export.ExportedProgram:
    subject = original.subject
    point = original.point
    if point is None:
        point = max(subject.spec.points(), key=total_size)
    input_set = subject.set_at(point)
    example = tuple(input_set.cloned().values())
    try:
        with _quiet():
            # not a public interface: a release may lack it
            from torch._export.converter import TS2EPConverter

            source = flat_forward(_reloaded(subject), subject.spec)
            return TS2EPConverter(source, example, {}).convert()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        kind = type(cause).__name__
        raise CaptureError(f"PyTorch's converter: {kind}: {first_line(cause)}") from error


def _reloaded(subject: Subject) -> torch.jit.ScriptModule:
    """A copy whose graph is not shared with the source, unlike a deep copy's: the converter writes
    into graphs.
    """
    file = io.BytesIO()
    torch.jit.save(subject.fresh(), file)
    file.seek(0)
    module = torch.jit.load(file)
    module.eval()
    return cast(torch.jit.ScriptModule, module)


@contextmanager
def _quiet() -> Iterator[None]:
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
