"""The capture of a TorchScript source as an ExportedProgram, by PyTorch's own converter.

The converter is not a public interface. It takes no `if` on sizes, no loop over a variable number,
and no state.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.equivalence import EagerAnswers
from freezer.freezing.capture.export import DIMS, export_flat, named
from freezer.freezing.capture.program import Captured, FlatModule
from freezer.freezing.diagnostics.source_lines import line_of_node
from freezer.freezing.models import Subject, flat_forward, module_of
from freezer.runtime.loaders import torchscript_deprecations_silenced


def convert(
    subject: Subject, point: Mapping[str, int] | None, eager: Callable[[], EagerAnswers]
) -> Captured:
    """Convert a TorchScript source to an exported program.

    Raises:
        CaptureError: the converter does not take the graph, or its program cannot be exported for
            the declared sizes, or differs from the source.
    """
    example = subject.set_at(
        point
        if point is not None
        else max(subject.spec.points(), key=lambda sizes: sum(sizes.values()))
    )
    source = cast(torch.jit.ScriptModule, subject.model)
    in_order = replace(subject.spec, inputs=subject.spec.tensors, style="positional")
    try:
        with _quietly():
            from torch._export.converter import (
                TS2EPConverter,
            )  # not a public interface: a release may lack it

            source = _reloaded(subject)
            flat = flat_forward(source, subject.spec)
            program = TS2EPConverter(flat, tuple(example.cloned().values()), {}).convert()
    except Exception as error:
        raise CaptureError(f"PyTorch's converter: {_sentence(error, source)}") from error
    try:
        with _quietly():
            captured = export_flat(
                lambda: FlatModule(module_of(program), in_order).eval(),
                "convert",
                subject,
                point,
                eager,
            )
    except CaptureError as error:
        guard = str(error.__cause__).strip().partition("\n")[0]
        if isinstance(error.__cause__, AssertionError) and guard.startswith("Guard failed: "):
            sizes = named(guard.removeprefix("Guard failed: "), subject.spec)
            why = (
                f"PyTorch's converter makes a program of fixed sizes, {sizes}, since forward asks"
                " for a size"
            )
            raise CaptureError(why, code=DIMS) from error.__cause__
        raise
    compared = (
        "; its answers match the source's on every input set" if eager().deterministic else ""
    )
    note = f"PyTorch's converter made the program from TorchScript{compared}."
    return replace(captured, notes=(*captured.notes, note))


def _reloaded(subject: Subject) -> torch.jit.ScriptModule:
    """A copy whose graph is not shared with the source, unlike a deep copy's: the converter writes
    into graphs.
    """
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
    """Describe a failed conversion: the innermost node that it names, the user's line, and the
    reason, from the causes.
    """
    node, said = None, ""
    cause: BaseException | None = error
    while cause is not None:
        first = first_line(cause)
        found = re.fullmatch(r"TS2EPConverter failed for node (\S+)", first)
        node, said = (
            (found[1], "") if found else (node, f"{type(cause).__name__}: {first.rstrip('.')}")
        )
        cause = cause.__cause__
    if node is None:
        return said
    graph: Any = module.inlined_graph  # keep a reference: its nodes die with it
    first_node = graph.findNode(node, True)
    where = first_node and line_of_node(first_node.sourceRange())
    return (
        f"it does not take {node}"
        + (f" at {where}" if where else "")
        + (f" ({said})" if said else "")
    )
