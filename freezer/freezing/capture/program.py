"""The result of a capture, and the flat form of a model that most captures take."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freezer.codec import frozen
from freezer.freezing.diagnostics import warned_at
from freezer.freezing.models import Subject
from freezer.freezing.recipes import CaptureName
from freezer.runtime.tensors import leaves_of
from freezer.spec import InputSpec, Point, TensorSpec, bind

Texts = Mapping[str, str]
"""Long texts by file name."""


@frozen
class Captured:
    """A graph of a model.

    Attributes:
        name: name of the capture that made it.
        program: an ExportedProgram, or a ScriptModule.
        convention: how to call its payload: with tensors in order (flat), or like the source
            (native).
        mutates: names of the buffers that a call changes, as far as the graph shows.
        warnings: warnings of the capture, one line each.
        guards: conditions on inputs, in words: the sizes of dims, and the program's assertions.
        notes: further remarks for people.
        preserve: attributes and methods that a lowering must keep.
        texts: long texts by file name.
        inputs: inputs of a flat program, in order.
        owned: tensors that only the program refers to; a lowering may free them.
        calibration: inputs of the program, in order, to calibrate a lower precision with.
        exact: nodes of the program that stay in floating point.
    """

    name: CaptureName
    program: Any
    convention: Literal["flat", "native"]
    mutates: Sequence[str] = ()
    warnings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    preserve: Sequence[str] = ()
    texts: Texts = field(default_factory=dict)
    owned: Sequence[Tensor] = ()
    inputs: Sequence[TensorSpec] = ()
    calibration: Sequence[Sequence[Tensor]] = ()
    exact: Sequence[str] = ()

    def source_name(self, name: str) -> str:
        """The source model's name of an attribute of the program; a flat program holds the model as
        `model`.
        """
        if self.convention == "flat":
            return name.removeprefix("model.")
        return name


class FlatModule(nn.Module):
    """The flat form of a model: takes tensors in order and returns a tuple of tensors.

    Attributes:
        layouts: memory formats to give to outputs, by index, where a capture's layout would differ
            from eager's.
    """

    def __init__(self, model: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self.layouts: Mapping[int, torch.memory_format] = {}
        self._spec = spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        names = [spec.name for spec in self._spec.tensors]
        args, kwargs = bind(self._spec, dict(zip(names, tensors, strict=True)))
        leaves = leaves_of(self.model(*args, **kwargs))
        for index, layout in self.layouts.items():
            leaves[index] = leaves[index].contiguous(memory_format=layout)
        return tuple(leaves)


def flat_form(subject: Subject) -> FlatModule:
    """The flat form of a model in its initial state."""
    return FlatModule(subject.fresh(), subject.spec).eval()


def total_size(point: Point) -> int:
    """The sum of a point's sizes, to order points."""
    return sum(point.values())


def sizes_text(point: Point) -> str:
    """A point in words: `batch=2, seq=8`."""
    return ", ".join(f"{name}={size}" for name, size in point.items())


def lines_of(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """One line per warning, with the user's source line; without torch.jit's deprecations and
    repetitions.
    """
    lines = []
    for warning in caught:
        kind = warning.category.__name__
        text, _, _ = str(warning.message).strip().partition("\n")
        if "deprecated" in text and "torch.jit." in text:
            continue
        line = warned_at(warning)
        place = f" At {line}" if line else ""
        lines.append(f"{kind}: {text}{place}")
    return tuple(dict.fromkeys(lines))
