"""Captures by torch.jit.script, which keeps a model's control flow, and captures of a TorchScript
source: unchanged, or as an ExportedProgram, by PyTorch's own converter.

The converter is not a public interface. It takes no `if` on sizes, no loop over a variable number,
and no state.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import Original, check_answers
from freezer.freezing.capture.export import export_flat
from freezer.freezing.capture.program import Captured, FlatModule, lines_of, total_size
from freezer.freezing.diagnostics import quiet, root_cause, sentence
from freezer.freezing.models import flat_forward, module_of, reloaded
from freezer.runtime.loaders import torchscript_deprecations_silenced


def as_is(original: Original) -> Captured:
    """Take a TorchScript source in its initial state."""
    subject = original.subject
    return Captured(
        name="as-is",
        program=subject.fresh(),
        convention="native",
        preserve=subject.kept_names,
    )


def script(original: Original) -> Captured:
    """Compile a model from its source, with the methods to keep. Traced and scripted parts stay
    unchanged.

    Raises:
        CaptureError: TorchScript does not take the model, or the script differs from it.
    """
    subject = original.subject
    model = subject.fresh()
    try:
        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            _new_types(),
            _exported_methods(model, subject.kept_names),
            warnings.catch_warnings(record=True, action="always") as caught,
        ):
            program = torch.jit.script(model)
    except Exception as error:
        raise CaptureError(f"torch.jit.script: {sentence(error, 'script')}") from error
    unchecked = check_answers(
        "the script",
        program,
        original,
        flat=False,
    )
    return Captured(
        name="script",
        program=program,
        convention="native",
        warnings=(*lines_of(caught), *unchecked),
        preserve=subject.kept_names,
    )


@contextmanager
def _new_types() -> Iterator[None]:
    """Make torch.jit.script compile each class again.

    It caches the type of a class that it failed to compile, and the next time only reports that
    `forward` cannot be redefined.
    """
    recursive = torch.jit._recursive
    store = recursive.concrete_type_store
    recursive.concrete_type_store = recursive.ConcreteTypeStore()
    try:
        yield
    finally:
        recursive.concrete_type_store = store


@contextmanager
def _exported_methods(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make torch.jit.script compile those names that are methods, as if they had
    @torch.jit.export.
    """
    marked = []
    for name in names:
        method = getattr(model, name, None)  # names with a dot are attributes of submodules
        if inspect.ismethod(method) and not hasattr(method, "_torchscript_modifier"):
            marked.append(torch.jit.export(method.__func__))
    try:
        yield
    finally:
        for function in marked:
            vars(function).pop("_torchscript_modifier", None)


def convert(original: Original) -> Captured:
    """Convert a TorchScript source to an exported program.

    Raises:
        CaptureError: the converter does not take the graph, or its program cannot be exported for
            the declared sizes, or differs from the source.
    """
    spec = original.subject.spec
    program = _converted(original)
    in_order = replace(spec, inputs=spec.tensors, style="positional")
    with torch.no_grad(), torchscript_deprecations_silenced(), quiet("torch._export"):
        return export_flat(
            lambda: FlatModule(module_of(program), in_order).eval(), "convert", original
        )


def _converted(original: Original) -> torch.export.ExportedProgram:
    subject = original.subject
    point = original.point
    if point is None:
        point = max(subject.spec.points(), key=total_size)
    example = tuple(subject.set_at(point).cloned().values())
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), quiet("torch._export"):
            # not a public interface: a release may lack it
            from torch._export.converter import TS2EPConverter

            copied = reloaded(subject.fresh(), subject.device)  # the converter writes into graphs
            source = flat_forward(copied.eval(), subject.spec)
            return TS2EPConverter(source, example, {}).convert()
    except Exception as error:
        raise CaptureError(
            f"PyTorch's converter: {sentence(root_cause(error), 'export')}"
        ) from error
