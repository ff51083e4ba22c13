"""Build a candidate: one recipe, one model, one target."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from freezer.artifact.freezing_report import NOT_TRIED, FreezingReport
from freezer.artifact.manifest import Payload, PayloadKind
from freezer.errors import BuildError, CaptureError, FreezeError, LeakError
from freezer.files.digest import digest_file
from freezer.freezing.candidates.candidate import EVIDENCE, Candidate
from freezer.freezing.capture.capture import Attempt
from freezer.freezing.capture.program import Captured
from freezer.freezing.lowering.custom_operators import check_operators
from freezer.freezing.lowering.lowerings import LOWERINGS
from freezer.freezing.lowering.readable import captured_texts
from freezer.freezing.lowering.result import timed
from freezer.freezing.models.subject import Subject, placed
from freezer.freezing.models.weights import give_back, is_large, let_go, weights_digest
from freezer.freezing.recipes.recipes import CaptureName, Recipe, made_for
from freezer.freezing.target.target import Target, toolchain
from freezer.freezing.target.torch_config import without_environment
from freezer.hardware.peak_memory import PeakMemory
from freezer.runtime.cuda import current
from freezer.runtime.precision import full_on_gpu
from freezer.runtime.tensor_memory import program_bytes, program_tensors
from freezer.runtime.threads import threads
from freezer.spec.inputs import Dim


def build(subject: Subject, recipe: Recipe, target: Target, folder: Path, *, discard: bool = False) -> Candidate:
    """Capture the subject, lower the graph, and write the payloads: one for each shape and thread count that the recipe asks for.

    The graph is captured once for each shape, and lowered for each thread count under that count.

    Args:
        subject: the model; it is not changed, unless it is to be discarded. It is placed on the target's device.
        recipe: of RECIPES.
        target: a class whose limits this process holds.
        folder: an existing folder, empty, which becomes the candidate's.
        discard: free the model's weights as soon as the last graph is captured, so that its lowering has their memory. The subject
            cannot be used afterwards; and if that lowering fails, no other way is tried.

    Raises:
        CaptureError: no capture that the recipe allows works.
        BuildError: no lowering of a captured graph works, or keeps the model's state.
    """
    started = time.monotonic()
    subject, recipe = placed(subject, target.device), made_for(recipe, target.device_class.kind)
    (folder / "payloads").mkdir()
    made: list[_Made] = []
    tried: list[dict[str, str]] = []
    weights, shapes = weights_digest(subject.model), _shapes(subject, recipe)
    targets = [target.at(count) for count in (target.thread_counts if recipe.by_thread else (target.num_threads,))]
    exact = full_on_gpu() if target.device.type == "cuda" else contextlib.nullcontext()
    with threads(target.num_threads), without_environment(), current(target.device), exact:
        for name, point in shapes:
            last_one = name == shapes[-1][0]
            made += _first_that_works(Attempt(subject, point), recipe, targets, folder, name, tried, discard=discard and last_one)
    last = made[-1]
    made.sort(key=lambda item: target.thread_counts.index(item.payload.num_threads or target.num_threads))
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
        toolchain=toolchain(target.device),
        weights=weights,
        build_s=time.monotonic() - started,
        preserve=subject.kept_names,
    )
    candidate.write()
    return candidate


@dataclass(frozen=True, kw_only=True)
class _Made:
    captured: Captured
    payload: Payload
    report: FreezingReport


def _first_that_works(
    attempt: Attempt,
    recipe: Recipe,
    targets: Sequence[Target],
    folder: Path,
    name: str,
    tried: list[dict[str, str]],
    *,
    discard: bool,
) -> list[_Made]:
    """A payload for each target, of the first way of the recipe that works; what was tried is added to `tried`, with the file of
    each error.

    A way that is not for such a model is noted, and told only where no other was tried.

    Raises:
        CaptureError, BuildError: no way works; a sentence for each, and the last code that says more than its class's.
    """
    errors: dict[str, FreezeError] = {}
    unfit: dict[str, str] = {}
    handled = sys.exception()
    for number, (capture, lowering) in enumerate(recipe.ways):
        row = {"payload": name, "capture": capture, "lowering": lowering}
        if why := attempt.unfit(capture):
            tried.append({**row, "outcome": f"{NOT_TRIED}: {why}"})
            unfit[capture] = why
            continue
        try:
            with PeakMemory() as memory:
                made = _make(attempt, capture, lowering, recipe, targets, folder, name, discard=discard)
        except (CaptureError, BuildError) as error:
            file = folder / EVIDENCE / f"{name}-{number}-{capture}-error.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(traceback.format_exception(error)))
            tried.append({**row, "outcome": str(error), "error": str(file.relative_to(folder))})
            let_go(error, handled)
            if is_large(attempt.subject.model):
                gc.collect()  # graphs refer to each other
            errors[capture] = error
            if isinstance(error, LeakError):
                break  # another graph would be compiled with the same flags
        else:
            tried.append({**row, "outcome": "captured and lowered"})
            return [replace(one, report=replace(one.report, memory_peak_bytes=memory.bytes)) for one in made]
    message = "; ".join(f"{capture}: {why}" for capture, why in (errors or unfit).items())
    if not errors:
        raise CaptureError(message)
    worst = next(error for kind in (LeakError, BuildError, FreezeError) for error in errors.values() if isinstance(error, kind))
    finer = (error.code for error in reversed(errors.values()) if error.code != type(error).code)
    code = None if isinstance(worst, LeakError) else next(finer, None)
    raise type(worst)(message, code=code) from ExceptionGroup("the ways that were tried", list(errors.values()))


def _make(
    attempt: Attempt,
    capture: CaptureName,
    lowering: PayloadKind,
    recipe: Recipe,
    targets: Sequence[Target],
    folder: Path,
    name: str,
    *,
    discard: bool,
) -> list[_Made]:
    """The payloads of one shape, one for each target, made in one way of one graph."""
    phases: dict[str, float] = {}
    with timed(phases, "capture"):
        captured = attempt.capture(capture)
    check_operators(captured.program, lowering)
    if discard:
        attempt.discarded = True
        give_back(program_tensors(attempt.subject.model), in_use=program_tensors(captured.program))
    captured = replace(captured, texts={**captured_texts(captured.program), **captured.texts})
    made: list[_Made] = []
    for target in targets:
        # Only the last lowering may free the program's tensors, and only the first is told what the capture took.
        ready = captured if target is targets[-1] else replace(captured, owned=())
        stem = f"{name}-threads{target.num_threads}" if len(targets) > 1 else name
        made.append(_lowered(attempt, ready, lowering, recipe, target, folder, stem, {} if made else phases))
    return made


def _lowered(
    attempt: Attempt,
    captured: Captured,
    lowering: PayloadKind,
    recipe: Recipe,
    target: Target,
    folder: Path,
    stem: str,
    phases: Mapping[str, float],
) -> _Made:
    """One payload of a captured graph; `phases` came before."""
    size_before_bytes, lower_s = program_bytes(captured.program), dict[str, float]()
    module = LOWERINGS[lowering]
    path = folder / "payloads" / f"{stem}{module.SUFFIX}"
    with timed(lower_s, "lower"), threads(target.num_threads):
        lowered = module.build(captured, path, target, recipe.settings)
    _write_texts(folder / EVIDENCE, stem, {**captured.texts, **lowered.texts})
    payload = _payload(attempt.subject, recipe, target, path, lowering, attempt.point, captured.convention, lowered.layouts)
    report = replace(
        lowered.report,
        phases_s={**phases, **(lowered.report.phases_s or lower_s)},
        size_before_bytes=size_before_bytes,
        size_after_bytes=payload.size_bytes,
        guards=captured.guards,
        notes=(*captured.notes, *lowered.report.notes),
    )
    return _Made(captured=replace(captured, program=None, owned=()), payload=payload, report=report)  # its weights need not stay


def _write_texts(folder: Path, name: str, texts: Mapping[str, str]) -> None:
    for file, text in texts.items():
        folder.mkdir(exist_ok=True)
        (folder / f"{name}-{file}").write_text(text)


def _shapes(subject: Subject, recipe: Recipe) -> list[tuple[str, dict[str, int] | None]]:
    """Name and point of each payload to build; no point means all sizes. The most special comes first."""
    if not any(dim.min < dim.max for dim in subject.spec.dims):
        return [("all", None)]
    if not recipe.by_shape:
        return [("all", None)]
    return [*(("-".join(f"{name}{size}" for name, size in point.items()), dict(point)) for point in subject.points), ("all", None)]


def _payload(
    subject: Subject,
    recipe: Recipe,
    target: Target,
    path: Path,
    kind: PayloadKind,
    point: Mapping[str, int] | None,
    convention: Literal["flat", "native"],
    layouts: Mapping[str, str],
) -> Payload:
    dims = subject.spec.dims
    if point is not None:
        dims = tuple(Dim(name=name, min=size, max=size) for name, size in point.items())
    return Payload(
        path=f"payloads/{path.name}",
        digest=digest_file(path),
        size_bytes=path.stat().st_size,
        kind=kind,
        num_threads=target.num_threads if recipe.by_thread else None,
        dims=dims,
        convention=convention,
        layouts=layouts,
    )
