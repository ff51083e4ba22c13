"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter.

The converter is not a public interface. It takes no `if` on sizes, no loop over a variable number,
and no state.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.equivalence import Original
from freezer.freezing.capture.export import export_flat
from freezer.freezing.capture.export_sizes import DIMS, with_names
from freezer.freezing.capture.program import Captured, FlatModule, total_size
from freezer.freezing.diagnostics import line_of_node
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
    try:
        with _quiet():
            captured = export_flat(
                lambda: FlatModule(module_of(program), in_order).eval(), "convert", original
            )
    except CaptureError as error:
        guard = first_line(error.__cause__) if error.__cause__ is not None else ""
        if not guard.startswith("Guard failed: "):
            raise
        sizes = with_names(guard.removeprefix("Guard failed: "), spec)
        raise CaptureError(
            f"PyTorch's converter makes a program of fixed sizes, {sizes}, since forward asks for a"
            " size",
            code=DIMS,
        ) from error.__cause__
    note = "PyTorch's converter made the program from TorchScript"
    if original.eager.deterministic:
        note += "; its answers match the source's on every input set"
    return replace(captured, notes=(*captured.notes, f"{note}."))


def _converted(original: Original) -> torch.export.ExportedProgram:
    subject = original.subject
    point = original.point
    if point is None:
        point = max(subject.spec.points(), key=total_size)
    example = tuple(subject.set_at(point).cloned().values())
    source = cast(torch.jit.ScriptModule, subject.model)
    try:
        with _quiet():
            # not a public interface: a release may lack it
            from torch._export.converter import TS2EPConverter

            source = _reloaded(subject)
            return TS2EPConverter(flat_forward(source, subject.spec), example, {}).convert()
    except Exception as error:
        raise CaptureError(f"PyTorch's converter: {_sentence(error, source)}") from error


def _reloaded(subject: Subject) -> torch.jit.ScriptModule:
    """A copy whose graph is not shared with the source, unlike a deep copy's: the converter writes
    into graphs.
    """
    file = io.BytesIO()
    torch.jit.save(subject.fresh(), file)
    file.seek(0)
    return cast(torch.jit.ScriptModule, torch.jit.load(file).eval())


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


def _sentence(error: BaseException, module: torch.jit.ScriptModule) -> str:
    """Describe a failed conversion: the innermost node that it names, the user's line, and the
    reason, from the causes.
    """
    node, reason = "", ""
    cause: BaseException | None = error
    while cause is not None:
        line = first_line(cause)
        failed = re.fullmatch(r"TS2EPConverter failed for node (\S+)", line)
        if failed:
            node, reason = failed[1], ""
        else:
            reason = f"{type(cause).__name__}: {line.rstrip('.')}"
        cause = cause.__cause__
    if not node:
        return reason
    graph: Any = module.inlined_graph  # keep a reference: its nodes die with it
    first_node = graph.findNode(node, True)
    place = line_of_node(first_node.sourceRange()) if first_node else None
    at, why = f" at {place}" if place else "", f" ({reason})" if reason else ""
    return f"it does not take {node}{at}{why}"
