"""What a capture makes, and the flat form of a model that most captures take."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freezer.freezing.diagnostics.source_lines import warned_at
from freezer.freezing.recipes.recipes import CaptureName
from freezer.runtime.pytree import leaves_of
from freezer.spec.inputs import InputSpec, bind

_PLAIN = (torch.contiguous_format,)
_LAYOUTS: Mapping[int, Sequence[torch.memory_format]] = {
    4: (*_PLAIN, torch.channels_last),
    5: (*_PLAIN, torch.channels_last_3d),
}


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A graph of a model.

    Attributes:
        name: of the capture that made it.
        program: an ExportedProgram, or a ScriptModule.
        convention: how a payload made of it is called.
        mutates: names of the buffers that a call changes, as far as the graph tells.
        warnings: what the capture said, one line each.
        guards: what inputs must hold to, in words: the sizes of dims, and what the program asserts.
        notes: what else people should know of the capture.
        preserve: attributes and methods that a lowering must keep.
        texts: by file name, what is too long for a note.
        owned: the tensors of the program that are nobody else's: a lowering may free them when it has taken what it needs.
    """

    name: CaptureName
    program: Any
    convention: Literal["flat", "native"]
    mutates: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    preserve: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    owned: tuple[Tensor, ...] = ()


class Flat(nn.Module):
    """A module that is called with tensors in order, and gives a tuple of tensors.

    Attributes:
        layouts: of outputs that a capture would lay out otherwise than eager does, by their place; the others stay as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layouts: Mapping[int, torch.memory_format] = {}

    def laid_out(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The output tensors, those in `layouts` laid out anew."""
        for place, layout in self.layouts.items():
            leaves[place] = leaves[place].contiguous(memory_format=layout)
        return tuple(leaves)


class FlatModule(Flat):
    """A model called with its tensor inputs in order, giving its output tensors as a tuple."""

    def __init__(self, model: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self._spec = spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output tensors, in order."""
        named = {item.name: tensor for item, tensor in zip(self._spec.tensors, tensors, strict=True)}
        args, kwargs = bind(self._spec, named)
        return self.laid_out(leaves_of(self.model(*args, **kwargs)))


def other_layouts(expected: Sequence[Tensor], got: Sequence[Tensor]) -> dict[int, torch.memory_format]:
    """The layouts of eager's outputs, by their place, that a capture gives in other strides, where a layout has a name."""
    found: dict[int, torch.memory_format] = {}
    for place, (one, other) in enumerate(zip(expected, got, strict=True)):
        named = next((layout for layout in _LAYOUTS.get(one.dim(), _PLAIN) if one.is_contiguous(memory_format=layout)), None)
        if named is not None and one.shape == other.shape and not other.is_contiguous(memory_format=named):
            found[place] = named
    return found


def lines_of(said: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """One line a warning, with the user's own line; torch.jit's deprecation and repetitions are left out."""
    seen: dict[str, None] = {}
    for item in said:
        text = str(item.message).strip().splitlines()[0] if str(item.message).strip() else item.category.__name__
        if "torch.jit." not in text or "deprecated" not in text:
            place = warned_at(item)
            seen[f"{item.category.__name__}: {text}" + (f" At {place}" if place else "")] = None
    return tuple(seen)
