"""Build the payloads of one shape, by the first way of a recipe that works."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from freezer.artifact import NOT_TRIED, FreezingReport, Payload, PayloadKind, size_of
from freezer.codec import frozen
from freezer.errors import BuildError, CaptureError, FreezeError, LeakError
from freezer.files import digest_file
from freezer.freezing.candidates.candidate import EVIDENCE
from freezer.freezing.candidates.mixed_precision import FOUND, KEPT_NODES, NodeSearch, keeping
from freezer.freezing.capture import REPAIRS, Attempt, Captured, repaired
from freezer.freezing.lowering import LOWERINGS, Phases, captured_texts, check_operators, timed
from freezer.freezing.models import clear_frames, free_tensors, is_large
from freezer.freezing.recipes import CaptureName, Recipe
from freezer.freezing.target import Target
from freezer.hardware import peak_memory
from freezer.runtime.input_sets import InputSet, resize
from freezer.runtime.tensors import program_bytes, program_tensors
from freezer.runtime.torch_settings import threads
from freezer.spec import FLOAT32, Dim

Tried = list[dict[str, str]]
"""Each attempted way in order: payload, capture, lowering, and the outcome in a sentence."""


@frozen
class Made:
    """One payload, its report, name and warnings of the capture it was made from, and its recipe,
    which names nodes that were left in floating point.
    """

    capture: CaptureName
    warnings: tuple[str, ...]
    payload: Payload
    report: FreezingReport
    recipe: Recipe


@frozen
class ShapeBuild:
    """Builds the payloads of one shape, one for each target.

    Attributes:
        attempt: captures of the model for the shape.
        targets: one for each thread count.
        folder: folder of the candidate.
        name: name of the shape in file names.
        discard: whether the model's weights are freed after the capture.
        further: whether the targets are those of further thread counts.
    """

    attempt: Attempt
    recipe: Recipe
    targets: Sequence[Target]
    folder: Path
    name: str
    discard: bool
    further: bool

    def first_that_works(self, tried: Tried) -> list[Made]:
        """Build by the first way of the recipe that works. Append each attempt to `tried`.

        Raises:
            CaptureError, BuildError: no way works. The message has each reason, the code is the
                most specific one.
        """
        errors: dict[str, FreezeError] = {}
        unfit: dict[str, str] = {}
        handled = sys.exception()
        for number, (capture, lowering) in enumerate(self.recipe.ways):
            row = {"payload": self.name, "capture": capture, "lowering": lowering}
            reason = self.attempt.unfit(capture)
            if reason:
                tried.append({**row, "outcome": f"{NOT_TRIED}: {reason}"})
                unfit[capture] = reason
                continue
            try:
                with peak_memory() as memory:
                    made = self._make(capture, lowering)
            except (CaptureError, BuildError) as error:
                text = "".join(traceback.format_exception(error))
                self._write_evidence(f"{number}-{capture}-error.txt", text)
                tried.append({**row, "outcome": str(error)})
                clear_frames(error, handled)
                if is_large(self.attempt.subject.model):
                    gc.collect()  # graphs refer to each other
                errors[capture] = error
                if isinstance(error, LeakError):
                    break  # another graph would be compiled with the same flags
            else:
                tried.append({**row, "outcome": "captured and lowered"})
                return [
                    replace(one, report=replace(one.report, memory_peak_bytes=memory.bytes))
                    for one in made
                ]
        raise _no_way(errors, unfit)

    def _make(self, capture: CaptureName, lowering: PayloadKind) -> list[Made]:
        """Capture the graph once, and lower it for each target."""
        phases = Phases()
        with timed(phases, "capture"):
            captured = self.attempt.capture(capture)
            if REPAIRS in self.recipe.settings:
                captured = repaired(captured, self.recipe.settings[REPAIRS])
        check_operators(captured.program, lowering)
        if self.discard:
            self.attempt.discarded = True
            free_tensors(
                program_tensors(self.attempt.subject.model),
                in_use=program_tensors(captured.program),
            )
        texts = {**captured_texts(captured.program), **captured.texts}
        captured = self._with_samples(replace(captured, texts=texts))
        made: list[Made] = []
        for target in self.targets:
            # Only the last lowering may free the program's tensors, and only the first reports the
            # time of the capture.
            ready = captured if target is self.targets[-1] else replace(captured, owned=())
            made.append(self._lower(ready, lowering, target, {} if made else phases))
        if exact := self._exact_nodes(captured, made[0].payload):
            return replace(self, recipe=keeping(self.recipe, exact))._make(capture, lowering)
        return made

    def _exact_nodes(self, captured: Captured, payload: Payload) -> Sequence[str]:
        """The nodes to leave in floating point if a payload in int8 breaks the budget on the search
        samples, searched once for all recipes and shapes, unless the model is large.
        """
        subject = self.attempt.subject
        held_out = subject.held_out
        is_int8 = self.recipe.precision.startswith("int8")
        is_done = self.further or KEPT_NODES in self.recipe.settings
        if held_out is None or not is_int8 or is_done or is_large(subject.model):
            return ()
        search = NodeSearch(
            captured=captured,
            samples=self._fitting([inputs for inputs, _ in held_out.search]),
            subject=subject,
            held_out=held_out,
            target=self.targets[0],
        )
        at = search.fails_at(self.folder / payload.path, payload.kind, self.recipe.settings)
        if at is None:
            return ()
        if held_out not in FOUND:
            FOUND[held_out] = search.exact_nodes(at)
        return FOUND[held_out]

    def _with_samples(self, captured: Captured) -> Captured:
        """The graph with samples for a lower precision, at the sizes of the shape."""
        held_out = self.attempt.subject.held_out
        if held_out is None or self.recipe.precision == FLOAT32:
            return captured
        return replace(
            captured,
            owned=captured.owned if is_large(self.attempt.subject.model) else (),
            calibration=self._fitting(held_out.calibration),
            exact=self.recipe.settings.get(KEPT_NODES, ()),
        )

    def _fitting(self, sets: Sequence[InputSet]) -> list[list[Tensor]]:
        spec, point = self.attempt.subject.spec, self.attempt.point
        fitting = sets if point is None else [resize(inputs, spec, point) for inputs in sets]
        return [list(inputs.tensors.values()) for inputs in fitting]

    def _lower(
        self, captured: Captured, lowering: PayloadKind, target: Target, phases: Phases
    ) -> Made:
        size_before_bytes, lower_s = program_bytes(captured.program), Phases()
        module = LOWERINGS[lowering]
        suffix = f"-threads{target.num_threads}" if self.further else ""
        path = self.folder / "payloads" / f"{self.name}{suffix}{module.SUFFIX}"
        with timed(lower_s, "lower"), threads(target.num_threads):
            lowered = module.build(captured, path, target, self.recipe.settings)
        for file, text in {**captured.texts, **lowered.texts}.items():
            self._write_evidence(file, text, suffix)
        dims, point = self.attempt.subject.spec.dims, self.attempt.point
        if point is not None:
            dims = tuple(Dim(name=name, min=size, max=size) for name, size in point.items())
        payload = Payload(
            path=f"payloads/{path.name}",
            digest=digest_file(path),
            size_bytes=path.stat().st_size,
            kind=lowering,
            num_threads=target.num_threads if self.recipe.by_thread else None,
            dims=dims,
            convention=captured.convention,
            layouts=lowered.layouts,
            weights=lowered.weights,
        )
        return Made(
            capture=captured.name,
            warnings=captured.warnings,
            payload=payload,
            report=replace(
                lowered.report,
                phases_s={**phases, **(lowered.report.phases_s or lower_s)},
                size_before_bytes=size_before_bytes,
                size_after_bytes=size_of([payload]),
                guards=captured.guards,
                notes=(*captured.notes, *lowered.report.notes),
            ),
            recipe=self.recipe,
        )

    def _write_evidence(
        self,
        name: str,
        text: str,
        suffix: str = "",
    ) -> None:
        file = self.folder / EVIDENCE / f"{self.name}{suffix}-{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def _no_way(errors: dict[str, FreezeError], unfit: Mapping[str, str]) -> FreezeError:
    """The error of a shape for which no way works; ways unfit for the model only count where no
    other was tried.
    """
    message = "; ".join(f"{capture}: {why}" for capture, why in (errors or unfit).items())
    if not errors:
        return CaptureError(message)
    causes = list(errors.values())
    [*_, worst] = sorted(causes, key=lambda error: isinstance(error, BuildError))
    finer = [error.code for error in causes if error.code != type(error).code]
    if isinstance(worst, LeakError):
        finer = []
    error = type(worst)(message, code=finer[-1] if finer else None)
    error.__cause__ = ExceptionGroup("every way failed", causes)
    return error
