"""Captures: making a graph of a model. Every capture works on a fresh copy of the model, in its initial state.

`export`, `trace` and `convert` capture a flat form of the model: tensor inputs in order, a tuple of tensors out, constants baked
in. So a payload depends on no class of the source: not on its outputs' types, not on its package. A model that came as TorchScript
is taken `as-is`; `script` compiles a model's own source. Both are called as the source is.

All but `as-is` are held against the eager model before anything is built of them: equivalence.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from freezer.errors import CaptureError
from freezer.freezing.capture.convert import convert
from freezer.freezing.capture.equivalence import EagerAnswers, ask_eager
from freezer.freezing.capture.export import export, strict_may_help
from freezer.freezing.capture.program import Captured, FlatModule
from freezer.freezing.capture.script import as_is, refuse_kept, script
from freezer.freezing.capture.trace import trace
from freezer.freezing.models.subject import Subject
from freezer.freezing.recipes.recipes import CaptureName

__all__ = ["Attempt", "Captured", "FlatModule"]


class Attempt:
    """A subject that captures are tried on, and its eager answers, which are asked for when the first capture needs them.

    Args:
        subject: the model.
        point: the only sizes that the graph is for; None for all.

    Attributes:
        discarded: whether the model's weights were given back, so that nothing can be captured any more.
    """

    def __init__(self, subject: Subject, point: Mapping[str, int] | None) -> None:
        at_point = tuple(item for item in subject.sets if point is None or dict(item.point) == dict(point))
        self.subject = replace(subject, sets=at_point)
        self.point = point
        self.discarded = False
        self._exported: CaptureError | None = None
        """Why the capture `export` failed; None where it did not, or was not tried."""
        self._tried: set[CaptureName] = set()

    @functools.cached_property
    def eager(self) -> EagerAnswers:
        """What the eager model answers."""
        return ask_eager(self.subject)

    def unfit(self, name: CaptureName) -> str | None:
        """Why a capture is not for such a model at all, in a few words; None where it is worth a try."""
        if self.discarded:
            return "the model was discarded when it had been captured"
        scripted = self.subject.scripted
        if name in ("as-is", "convert"):
            return None if scripted else "the source is no TorchScript"
        if scripted:
            return "the source is TorchScript"
        if name == "script" and isinstance(self.subject.model, torch.fx.GraphModule):
            return "the source is an exported program, which torch.jit.script does not take"
        if name == "export-strict" and "export" in self._tried:
            if self._exported is None:
                return "torch.export took the model, and strict tracing gives the same program"
            if not strict_may_help(self._exported):
                return "what torch.export refused, strict tracing refuses too"
        return None

    def capture(self, name: CaptureName) -> Captured:
        """The graph that one capture makes.

        Raises:
            CaptureError: it is not for such a model, does not take it, or what it made differs from the model.
        """
        if why := self.unfit(name):
            raise CaptureError(why)
        self._tried.add(name)
        try:
            return self._capture(name)
        except CaptureError as error:
            if name == "export":
                self._exported = error
            raise

    def _capture(self, name: CaptureName) -> Captured:
        subject, point = self.subject, self.point
        if name == "as-is":
            return as_is(subject)
        if name == "script":
            return script(subject, lambda: self.eager)
        if name == "trace":
            refuse_kept(subject.kept_names, "a trace")
            return trace(subject, point, lambda: self.eager)
        refuse_kept(subject.kept_names, "an exported program")
        if name == "convert":
            return convert(subject, point, lambda: self.eager)
        return export(subject, point, lambda: self.eager, strict=name == "export-strict")
