"""Captures: make a graph of a model. Every capture works on a fresh copy of the model in its
initial state. READ THIS FIRST.

`export`, `trace` and `convert` capture a flat form of the model: tensors in order in, a tuple of
tensors out, constants baked in, so a payload depends on no class of the source. `as-is` takes a
TorchScript source unchanged; `script` compiles the model's source. Both keep the source's
signature. All but `as-is` are compared with the eager model first (equivalence.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from freezer.errors import CaptureError
from freezer.freezing.capture.convert import convert
from freezer.freezing.capture.equivalence import SIZES, EagerAnswers, run_eager
from freezer.freezing.capture.export import DIMS, export, strict_may_help
from freezer.freezing.capture.program import Captured
from freezer.freezing.capture.script import as_is, script
from freezer.freezing.capture.trace import trace
from freezer.freezing.models import PRESERVE, Subject
from freezer.freezing.recipes import CaptureName
from freezer.spec import interior_points, points_beside

NUM_FURTHER_POINTS = 6
"""Points between the bounds at which a capture for all sizes is compared; the judge's input sets
have the first of them.
"""


class Attempt:
    """A subject to capture, and its eager answers, computed when the first capture needs them.

    Args:
        subject: the model.
        point: the only sizes that the graph is for; None for all.
        keeps: whether graphs of a model without state are kept for further recipes, whose lowerings
            may not free their tensors.

    Attributes:
        discarded: whether the model's weights were freed, so that nothing more can be captured.
    """

    def __init__(
        self, subject: Subject, point: Mapping[str, int] | None, *, keeps: bool = False
    ) -> None:
        at_point = tuple(
            item for item in subject.sets if point is None or dict(item.point) == dict(point)
        )
        self.subject = replace(subject, sets=at_point)
        self.point = point
        if point is None:
            self._add_sets(interior_points(subject.spec, NUM_FURTHER_POINTS))
        self.discarded = False
        self._tried: dict[CaptureName, CaptureError | None] = {}
        """The error of each capture that was tried, or None if it succeeded."""
        self._keeps = keeps
        self._kept: dict[CaptureName, Captured] = {}

    @functools.cached_property
    def eager(self) -> EagerAnswers:
        """The eager model's answers."""
        return run_eager(self.subject)

    def unfit(self, name: CaptureName) -> str | None:
        """Why a capture cannot take such a model, in a few words; None if it is worth a try."""
        if self.discarded:
            return "the model was discarded after it was captured"
        scripted = self.subject.scripted
        if name in ("as-is", "convert"):
            return None if scripted else "the source is not TorchScript"
        if scripted:
            return "the source is TorchScript"
        if name == "script" and isinstance(self.subject.model, torch.fx.GraphModule):
            return "the source is an exported program, which torch.jit.script does not take"
        if name == "export-strict" and "export" in self._tried:
            refusal = self._tried["export"]
            if refusal is None:
                return "torch.export took the model, and strict tracing gives the same program"
            if not strict_may_help(refusal):
                return "strict tracing would fail for the same reason as torch.export"
        if name == "trace-sizes" and getattr(self._tried.get("trace"), "code", None) != SIZES:
            return "no trace was refused for the sizes that Python reads"
        return None

    def capture(self, name: CaptureName) -> Captured:
        """Make the graph of one capture.

        Raises:
            CaptureError: the capture cannot take the model, or the graph differs from the model.
        """
        if name in self._kept:
            return self._kept[name]
        if why := self.unfit(name):
            raise CaptureError(why)
        if self._keeps and (refusal := self._tried.get(name)) is not None:
            raise CaptureError(str(refusal), code=refusal.code)
        if name not in ("as-is", "script"):
            self._refuse_kept(name)
        try:
            captured = self._capture(name)
        except CaptureError as error:
            self._tried[name] = error
            if error.code == DIMS and self.point is None:
                self._add_sets(points_beside([str(error)], self.subject.spec))
            raise
        self._tried[name] = None
        if self._keeps and name != "as-is" and self.eager.second is None:
            captured = self._kept[name] = replace(captured, owned=())
        return captured

    def _add_sets(self, points: Iterable[Mapping[str, int]]) -> None:
        """Add input sets at points that lack one, to compare further captures with the
        model there.
        """
        known = [dict(item.point) for item in self.subject.sets]
        further = [self.subject.further_set(point) for point in points if point not in known]
        self.subject = replace(self.subject, sets=(*self.subject.sets, *further))
        self.__dict__.pop("eager", None)

    def _refuse_kept(self, name: CaptureName) -> None:
        """Refuse a capture that reduces a model to one function, if names must be kept."""
        if self.subject.kept_names:
            listed = ", ".join(repr(kept) for kept in self.subject.kept_names)
            what = "a trace" if name.startswith("trace") else "an exported program"
            why = f"{what} keeps no attribute or method, and {listed} must stay"
            raise CaptureError(
                f"{why}; preserve needs torch.jit.script or a TorchScript source", code=PRESERVE
            )

    def _capture(self, name: CaptureName) -> Captured:
        subject, point = self.subject, self.point
        if name == "as-is":
            return as_is(subject)
        if name == "script":
            return script(subject, lambda: self.eager)
        if name in ("trace", "trace-sizes"):
            return trace(subject, point, lambda: self.eager, every_size=name == "trace-sizes")
        if name == "convert":
            return convert(subject, point, lambda: self.eager)
        return export(subject, point, lambda: self.eager, strict=name == "export-strict")
