"""Captures: make a graph of a model. Every capture works on a fresh copy of the model in its
initial state. READ THIS FIRST.

`export`, `trace` and `convert` capture a flat form of the model: tensors in order in, a tuple of
tensors out, constants baked in, so a payload depends on no class of the source. `as-is` takes a
TorchScript source unchanged; `script` compiles the model's source. Both keep the source's
signature. All but `as-is` are compared with the eager model first (equivalence.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from freezer.errors import CaptureError
from freezer.freezing.capture.equivalence import Original
from freezer.freezing.capture.export import export, strict_may_help
from freezer.freezing.capture.export_sizes import DIMS
from freezer.freezing.capture.program import Captured
from freezer.freezing.capture.script import as_is, convert, script
from freezer.freezing.capture.trace import SIZES, trace
from freezer.freezing.models import PRESERVE, ExportedModule, Subject
from freezer.freezing.recipes import CaptureName
from freezer.spec import interior_points, points_beside

NUM_FURTHER_POINTS = 6
"""Points between the bounds at which a capture for all sizes is compared; the judge's input sets
have the first of them.
"""


class Attempt:
    """A subject to capture.

    Args:
        subject: the model.
        point: the only sizes that the graph is for; None for all.
        keeps: whether graphs of a model without state are kept for further recipes, whose lowerings
            may not free their tensors.

    Attributes:
        point: the only sizes that the graph is for; None for all.
        discarded: whether the model's weights were freed, so that nothing more can be captured.
    """

    def __init__(
        self, subject: Subject, point: Mapping[str, int] | None, *, keeps: bool = False
    ) -> None:
        self.point = point
        self.discarded = False
        self._tried: dict[CaptureName, CaptureError | None] = {}
        """The error of each capture that was tried, or None if it succeeded."""
        self._keeps = keeps
        self._cache: dict[CaptureName, Captured] = {}
        sets = subject.sets
        if point is not None:
            wanted = dict(point)
            sets = tuple(each for each in sets if dict(each.point) == wanted)
        of_point = replace(subject, sets=sets)
        self._original = Original(subject=of_point, point=point)
        if point is None:
            points = interior_points(subject.spec, NUM_FURTHER_POINTS)
            self._add_sets(points)

    @property
    def subject(self) -> Subject:
        """The model, with the input sets that captures are compared on."""
        return self._original.subject

    def unfit(self, name: CaptureName) -> str | None:
        """Why a capture cannot take such a model, in a few words; None if it is worth a try."""
        model = self.subject.model
        scripted = self.subject.scripted
        if self.discarded:
            return "the model was discarded after it was captured"
        if scripted != (name in ("as-is", "convert")):
            return f"the source is {'' if scripted else 'not '}TorchScript"
        if name == "trace" and isinstance(model, ExportedModule):
            return "the source is an exported program, which a trace would fix to one size"
        if name == "script" and isinstance(model, torch.fx.GraphModule):
            return "the source is a graph, which torch.jit.script does not take"
        if name == "export-strict" and "export" in self._tried:
            error = self._tried["export"]
            if error is None:
                return "torch.export took the model, and strict tracing gives the same program"
            if not strict_may_help(error):
                return "strict tracing would fail for the same reason as torch.export"
        if name == "trace-sizes":
            error = self._tried.get("trace")
            if error is None or error.code != SIZES:
                return "no trace was refused for the sizes that Python reads"
        return None

    def capture(self, name: CaptureName) -> Captured:
        """Make the graph of one capture.

        Raises:
            CaptureError: the capture cannot take the model, or the graph differs from the model.
        """
        if name in self._cache:
            return self._cache[name]
        why = self.unfit(name)
        if why:
            raise CaptureError(why)
        earlier = self._tried.get(name)
        if self._keeps and earlier is not None:
            raise CaptureError(str(earlier), code=earlier.code)
        if name not in ("as-is", "script"):
            self._refuse_kept_names(name)
        try:
            captured = self._capture(name)
        except CaptureError as error:
            self._tried[name] = error
            if error.code == DIMS and self.point is None:
                message = str(error)
                points = points_beside([message], self.subject.spec)
                self._add_sets(points)
            raise
        self._tried[name] = None
        if not self._keeps or name == "as-is":
            return captured
        if self._original.eager.stateful:
            return captured
        captured = replace(captured, owned=())
        self._cache[name] = captured
        return captured

    def _add_sets(self, points: Iterable[Mapping[str, int]]) -> None:
        """Add input sets at points that lack one, to compare further captures with the
        model there.
        """
        subject = self.subject
        known = [dict(input_set.point) for input_set in subject.sets]
        more = [subject.further_set(point) for point in points if point not in known]
        subject = replace(subject, sets=(*subject.sets, *more))
        self._original = Original(subject=subject, point=self.point)

    def _refuse_kept_names(self, name: CaptureName) -> None:
        """Refuse a capture that reduces a model to one function, if names must be kept."""
        kept_names = self.subject.kept_names
        if kept_names:
            names = ", ".join(map(repr, kept_names))
            what = "a trace" if name.startswith("trace") else "an exported program"
            raise CaptureError(
                f"{what} keeps no attribute or method, and {names} must stay; preserve needs"
                " torch.jit.script or a TorchScript source",
                code=PRESERVE,
            )

    def _capture(self, name: CaptureName) -> Captured:
        original = self._original
        if name == "as-is":
            return as_is(original)
        if name == "script":
            return script(original)
        if name in ("trace", "trace-sizes"):
            return trace(original, every_size=name == "trace-sizes")
        if name == "convert":
            return convert(original)
        return export(original, strict=name == "export-strict")
