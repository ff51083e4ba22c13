"""Build a candidate: one recipe, one model, one target."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezer.artifact import NOT_TRIED, FreezingReport, Payload, PayloadKind
from freezer.errors import BuildError, CaptureError, FreezeError, LeakError
from freezer.files import digest_file, link_or_copy
from freezer.freezing.candidates.candidate import EVIDENCE, Candidate
from freezer.freezing.capture import Attempt, Captured
from freezer.freezing.environment import without_environment
from freezer.freezing.lowering import LOWERINGS, captured_texts, check_operators, timed
from freezer.freezing.models import (
    Subject,
    clear_frames,
    free_tensors,
    is_large,
)
from freezer.freezing.recipes import (
    RECIPES,
    CaptureName,
    Recipe,
    left_out,
    made_for,
    own_toolchain,
    select,
)
from freezer.freezing.target import Target, toolchain
from freezer.freezing.toolchain import installed_versions
from freezer.hardware import PORTABLE, peak_memory
from freezer.runtime.devices import current
from freezer.runtime.tensors import program_bytes, program_tensors
from freezer.runtime.torch_settings import full_on_gpu, threads
from freezer.spec import Dim, Limits


def build(
    subject: Subject,
    recipe: Recipe,
    target: Target,
    folder: Path,
    *,
    discard: bool = False,
    further: bool = False,
    attempts: dict[str, Attempt] | None = None,
) -> Candidate:
    """Capture the subject, lower the graph, and write a payload for each shape of the recipe.

    The graph is captured once per shape, and lowered once per thread count.

    Args:
        subject: the model, on the target's device; it is changed only with `discard`.
        recipe: one of RECIPES, or KEPT_EAGER.
        target: a class whose limits this process has.
        folder: an existing empty folder, which becomes the candidate's.
        discard: free the model's weights after the last capture, to leave their memory to the
            lowering. The subject cannot be used afterwards, and no other way is tried if that
            lowering fails.
        further: build for the further thread counts of the target instead of the first.
        attempts: captures of the same subject for other recipes, by shape, which this build uses
            and adds to.

    Raises:
        CaptureError: no capture of the recipe works.
        BuildError: no captured graph can be lowered.
        LeakError: the compiled code has instructions outside the device class.
    """
    started = time.monotonic()
    recipe = made_for(recipe, target.device_class.kind)
    (folder / "payloads").mkdir()
    made: list[_Made] = []
    tried: list[dict[str, str]] = []
    weights, shapes = subject.weights, _shapes(subject, recipe)
    targets = tuple(
        target.at(count) for count in (target.further_threads if further else (target.num_threads,))
    )
    exact = full_on_gpu() if target.device.type == "cuda" else contextlib.nullcontext()
    with threads(target.num_threads), without_environment(), current(target.device), exact:
        for name, point in shapes:
            attempt = (attempts or {}).get(name) or Attempt(
                subject, point, keeps=attempts is not None
            )
            if attempts is not None:
                attempts[name] = attempt
            shape = _ShapeBuild(
                attempt=attempt,
                recipe=recipe,
                targets=targets,
                folder=folder,
                name=name,
                discard=discard and name == shapes[-1][0],
                further=further,
            )
            made += shape.first_that_works(tried)
    last = made[-1]
    made.sort(
        key=lambda item: target.thread_counts.index(item.payload.num_threads or target.num_threads)
    )
    candidate = Candidate(
        folder=folder,
        recipe=recipe.name,
        lowering=last.payload.kind,
        capture=last.captured.name,
        settings=recipe.settings,
        tried=tuple(tried),
        payloads=tuple(item.payload for item in made),
        reports={item.payload.path: item.report for item in made},
        warnings=tuple(dict.fromkeys(line for item in made for line in item.captured.warnings)),
        toolchain=own_toolchain(recipe, toolchain(target.device)),
        weights=weights,
        build_s=time.monotonic() - started,
        preserve=subject.kept_names,
    )
    candidate.write()
    return candidate


def build_further(
    subject: Subject, candidate: Candidate, target: Target, folder: Path
) -> Candidate:
    """Add payloads for the further thread counts of a target to a candidate; return it unchanged if
    its payloads fit any count.

    Args:
        subject, target: see `build`.
        candidate: built for the first thread count; its folder is not changed.
        folder: an existing empty folder, which becomes the new candidate's.

    Raises:
        CaptureError, BuildError, LeakError: see `build`.
    """
    recipe = RECIPES[candidate.recipe]
    if not made_for(recipe, target.device_class.kind).by_thread:
        return candidate
    more = build(subject, recipe, target, folder, further=True)
    for file in (
        *(candidate.folder / "payloads").iterdir(),
        *(candidate.folder / EVIDENCE).glob("*"),
    ):
        link_or_copy(file, folder / file.relative_to(candidate.folder))
    made = replace(
        candidate,
        folder=folder,
        tried=(*candidate.tried, *more.tried),
        payloads=(*candidate.payloads, *more.payloads),
        reports={**candidate.reports, **more.reports},
        build_s=candidate.build_s + more.build_s,
    )
    made.write()
    return made


def _shapes(subject: Subject, recipe: Recipe) -> list[tuple[str, dict[str, int] | None]]:
    """Name and point of each shape that gets a payload, the most special first; the point None is
    for all sizes.
    """
    varies = any(dim.min < dim.max for dim in subject.spec.dims)
    points = subject.points if varies and recipe.by_shape else ()
    return [
        *(
            ("-".join(f"{name}{size}" for name, size in point.items()), dict(point))
            for point in points
        ),
        ("all", None),
    ]


@dataclass(frozen=True, kw_only=True)
class _Made:
    """One payload, its report, and the capture it was made from."""

    captured: Captured
    payload: Payload
    report: FreezingReport


@dataclass(frozen=True, kw_only=True)
class _ShapeBuild:
    """Builds the payloads of one shape, one for each target."""

    attempt: Attempt
    recipe: Recipe
    targets: Sequence[Target]
    folder: Path
    name: str
    discard: bool
    further: bool

    def first_that_works(self, tried: list[dict[str, str]]) -> list[_Made]:
        """Build by the first way of the recipe that works. Append each attempt to `tried`, with the
        file of its error.

        Raises:
            CaptureError, BuildError: no way works. The message has each reason, the code is the
                most specific one.
        """
        errors: dict[str, FreezeError] = {}
        unfit: dict[str, str] = {}
        handled = sys.exception()
        for number, (capture, lowering) in enumerate(self.recipe.ways):
            row = {"payload": self.name, "capture": capture, "lowering": lowering}
            if why := self.attempt.unfit(capture):
                tried.append({**row, "outcome": f"{NOT_TRIED}: {why}"})
                unfit[capture] = why
                continue
            try:
                with peak_memory() as memory:
                    made = self._make(capture, lowering)
            except (CaptureError, BuildError) as error:
                file = self._write_evidence(
                    f"{number}-{capture}-error.txt", "".join(traceback.format_exception(error))
                )
                tried.append(
                    {**row, "outcome": str(error), "error": str(file.relative_to(self.folder))}
                )
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

    def _make(self, capture: CaptureName, lowering: PayloadKind) -> list[_Made]:
        """Capture the graph once, and lower it for each target."""
        phases: dict[str, float] = {}
        with timed(phases, "capture"):
            captured = self.attempt.capture(capture)
        check_operators(captured.program, lowering)
        if self.discard:
            self.attempt.discarded = True
            free_tensors(
                program_tensors(self.attempt.subject.model),
                in_use=program_tensors(captured.program),
            )
        captured = replace(captured, texts={**captured_texts(captured.program), **captured.texts})
        made: list[_Made] = []
        for target in self.targets:
            # Only the last lowering may free the program's tensors, and only the first reports the
            # time of the capture.
            ready = captured if target is self.targets[-1] else replace(captured, owned=())
            made.append(self._lower(ready, lowering, target, {} if made else phases))
        return made

    def _lower(
        self, captured: Captured, lowering: PayloadKind, target: Target, phases: Mapping[str, float]
    ) -> _Made:
        size_before_bytes, lower_s = program_bytes(captured.program), dict[str, float]()
        module = LOWERINGS[lowering]
        suffix = f"-threads{target.num_threads}" if self.further else ""
        path = self.folder / "payloads" / f"{self.name}{suffix}{module.SUFFIX}"
        with timed(lower_s, "lower"), threads(target.num_threads):
            lowered = module.build(captured, path, target, self.recipe.settings)
        for file, text in {**captured.texts, **lowered.texts}.items():
            self._write_evidence(file, text, suffix)
        point, dims = self.attempt.point, self.attempt.subject.spec.dims
        payload = Payload(
            path=f"payloads/{path.name}",
            digest=digest_file(path),
            size_bytes=path.stat().st_size,
            kind=lowering,
            num_threads=target.num_threads if self.recipe.by_thread else None,
            dims=dims
            if point is None
            else tuple(Dim(name=name, min=size, max=size) for name, size in point.items()),
            convention=captured.convention,
            layouts=lowered.layouts,
        )
        report = replace(
            lowered.report,
            phases_s={**phases, **(lowered.report.phases_s or lower_s)},
            size_before_bytes=size_before_bytes,
            size_after_bytes=payload.size_bytes,
            guards=captured.guards,
            notes=(*captured.notes, *lowered.report.notes),
        )
        return _Made(
            captured=replace(captured, program=None, owned=()), payload=payload, report=report
        )  # releases the weights

    def _write_evidence(self, name: str, text: str, suffix: str = "") -> Path:
        file = self.folder / EVIDENCE / f"{self.name}{suffix}-{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file


def _no_way(errors: dict[str, FreezeError], unfit: Mapping[str, str]) -> FreezeError:
    """The error of a shape for which no way works; ways unfit for the model only count where no
    other was tried.
    """
    message = "; ".join(f"{capture}: {why}" for capture, why in (errors or unfit).items())
    if not errors:
        return CaptureError(message)
    worst = next(
        error
        for kind in (LeakError, BuildError, FreezeError)
        for error in errors.values()
        if isinstance(error, kind)
    )
    finer = (error.code for error in reversed(errors.values()) if error.code != type(error).code)
    error = type(worst)(message, code=None if isinstance(worst, LeakError) else next(finer, None))
    error.__cause__ = ExceptionGroup("every way failed", list(errors.values()))
    return error


logger = logging.getLogger("coldpress")


@dataclass(frozen=True, kw_only=True)
class Builds:
    """The candidates, the error of each recipe that failed, and why others were skipped."""

    candidates: list[Candidate] = field(default_factory=list)
    errors: dict[str, FreezeError] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> Mapping[str, str]:
        """By recipe that made no candidate, its error or why it was skipped."""
        return {recipe: str(error) for recipe, error in self.errors.items()} | self.skipped

    @property
    def tracebacks(self) -> Mapping[str, str]:
        """The full tracebacks of the errors."""
        return {
            recipe: "".join(traceback.format_exception(error))
            for recipe, error in self.errors.items()
        }


def build_all(
    subject: Subject, target: Target, recipes: Iterable[str], work: Path, limits: Limits
) -> Builds:
    """Build a candidate by each recipe, in folders `CLASS-RECIPE` of `work`.

    Recipes share captures, unless the model is large. After `limits.build_s` seconds no further
    build is started.
    """
    builds = Builds()
    attempts = None if is_large(subject.model) else dict[str, Attempt]()
    handled, started = sys.exception(), time.monotonic()
    wanted, kind = tuple(recipes), target.device_class.kind
    installed = installed_versions() if kind == "cpu" else ()
    if kind == "cpu" and (text := left_out(wanted, installed=installed)):
        logger.info("%s", text)
    for recipe in select(wanted, portable=kind == PORTABLE, installed=installed):
        if (builds.candidates or builds.errors) and (
            why := limits.over_build_s(time.monotonic() - started)
        ):
            builds.skipped[recipe.name] = f"skipped: {why}"
            logger.info("%s %s", recipe.name, builds.skipped[recipe.name])
            continue
        folder = work / f"{target.device_class.name}-{recipe.name}"
        folder.mkdir()
        logger.info("building %s for %s", recipe.name, target.device_class.name)
        try:
            builds.candidates.append(build(subject, recipe, target, folder, attempts=attempts))
        except FreezeError as error:
            clear_frames(error, handled)
            builds.errors[recipe.name] = error
    return builds
