"""The task that builds candidates of one model for one class ->
STORE/.coldpress/candidates/<build_key>/

A candidate is moved to its name atomically, so a repeated task finds it whole or not at all.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import FreezeError
from freezer.files import write_whole
from pipeline.failures import classify
from pipeline.records import BuildResult, Failure
from pipeline.worker.requests import BuildRequest
from pipeline.worker.sandbox import LOG, log_tail
from pipeline.worker.shared_weights import load_shared
from pipeline.worker.task_child import in_child
from pipeline.workspace import (
    ARCHITECTURE,
    Workplace,
    architecture_of,
    be_nice,
    note_digests,
    staging_folder,
    workplace,
)

if TYPE_CHECKING:
    from freezer.freezing.capture import Attempt
    from freezer.freezing.models import Subject
    from freezer.freezing.target import Target

NICENESS = 10
"""Least nice value of a build: judges run beside it, and their threads wait for each other."""


def build(request: BuildRequest) -> tuple[BuildResult, ...]:
    """Build the candidates that the store does not contain yet.

    One child loads the model and builds one after the other. When it dies, or the model is large, a
    new one builds the rest.
    """
    from pipeline.sources import download_sources  # it imports pyarrow, which children do not need

    place = workplace(request.store)
    done = {
        recipe: BuildResult(key=key, recipe=recipe, architecture=architecture_of(place, key))
        for recipe, key in request.builds.items()
        if place.has("candidates", key)
    }
    while len(done) < len(request.builds):
        builds = {recipe: key for recipe, key in request.builds.items() if recipe not in done}
        rest = replace(request, builds=builds, entry=download_sources(request.entry, place))
        done |= {result.recipe: result for result in _build_in_one_child(rest, place)}
    return tuple(done[recipe] for recipe in request.builds)


def _build_in_one_child(request: BuildRequest, place: Workplace) -> list[BuildResult]:
    """Return what a child built, and whose failure ended it: the first recipe's, or every recipe's
    if the model did not load.

    Another recipe may suffer from those before it. It has no result, and is built again in a new
    child, unless its time was up.
    """
    with staging_folder(place.root) as staging:
        end = in_child(_build_child, request, staging)
        results = list[BuildResult]()
        log_start = 0
        for result, log_end in end.parts:
            tail = _keep_part_of_log(place, result.key, staging, log_start, log_end)
            failure = replace(result.failure, log_tail=tail) if result.failure else None
            results.append(replace(result, failure=failure, peak_bytes=end.peak_bytes))
            log_start = log_end
        if end.failure is None:
            return results
        known = staging / ARCHITECTURE
        failed = list(request.builds.items())[len(results) :]
        architecture = known.read_text() if known.exists() else ""
        if architecture:
            failed = failed[:1] if not results or end.failure.kind == "timeout" else []
        wall_s = end.wall_s - sum(result.wall_s for result in results)
        for recipe, key in failed:
            _keep_part_of_log(place, key, staging, log_start, None)
            result = BuildResult(
                key=key,
                recipe=recipe,
                failure=end.failure,
                wall_s=wall_s,
                peak_bytes=end.peak_bytes,
                architecture=architecture,
            )
            results.append(result)
            wall_s = 0.0
        return results


def _keep_part_of_log(
    place: Workplace,
    key: str,
    staging: Path,
    start: int,
    end: int | None,
) -> str:
    """Store a part of a child's output as the log of a build, and return its last lines."""
    part = staging / "part.log"
    with suppress(OSError):
        part.write_bytes((staging / LOG).read_bytes()[start:end])
    tail = log_tail(part)
    place.keep_log(part, key)
    return tail


def _build_child(request: BuildRequest, staging: Path) -> Iterator[tuple[BuildResult, int]]:
    """Build and store one candidate after the other; yield each result, and the number of bytes
    printed until then.
    """
    from freezer.freezing.candidates import architecture_digest
    from freezer.freezing.capture import Attempt
    from freezer.freezing.lowering import objects_kept_in
    from freezer.freezing.models import is_large, to_device
    from freezer.freezing.recipes import RECIPES
    from freezer.freezing.target import target_here
    from freezer.hardware import PORTABLE, own_process

    started = time.monotonic()
    be_nice(max(os.getpriority(os.PRIO_PROCESS, 0), NICENESS))
    own_process()
    of_class = target_here(request.device_class, request.threads[0])
    on_host, _ = load_shared(request, of_class, staging)
    subject = to_device(on_host, of_class.device)
    write_whole(staging / ARCHITECTURE, architecture_digest(subject, of_class).encode())
    attempts = None if is_large(subject.model) else dict[str, Attempt]()
    place = workplace(request.store)
    for recipe, key in request.builds.items():
        folder, target = staging / recipe, of_class
        if RECIPES[recipe].portable:
            target = target_here(PORTABLE, request.threads[0])
        with objects_kept_in(place.objects):
            failure = _build_candidate(subject, recipe, target, folder, attempts)
        wall_s = time.monotonic() - started
        architecture = architecture_digest(subject, target)
        if failure is None:
            write_whole(folder / ARCHITECTURE, architecture.encode())
            if place.remote is None:  # a bucket's marker has its own digests
                note_digests(folder)
            place.keep(folder, "candidates", key)
        result = BuildResult(
            key=key, recipe=recipe, failure=failure, wall_s=wall_s, architecture=architecture
        )
        yield result, _printed_bytes()
        if attempts is None:
            return
        started = time.monotonic()


def _build_candidate(
    subject: Subject,
    name: str,
    target: Target,
    folder: Path,
    attempts: dict[str, Attempt] | None,
) -> Failure | None:
    """Build a candidate in a folder, and return why that failed, if the model is the reason.

    Args:
        attempts: captures to share with other recipes; None for a large model, whose process
            builds nothing afterwards.
    """
    from freezer.freezing.candidates import build as build_candidate
    from freezer.freezing.models import clear_frames
    from freezer.freezing.recipes import RECIPES

    folder.mkdir()
    recipe = RECIPES[name]
    # Inductor needs the memory of a large model. Recipes with other ways keep it.
    discard = attempts is None and all(lowering == "inductor" for _, lowering in recipe.ways)
    try:
        build_candidate(subject, recipe, target, folder, discard=discard, attempts=attempts)
    except FreezeError as error:
        failure = classify(error)
        if failure.kind != error.kind:
            raise  # of the circumstances, such as memory: a new process may succeed
        traceback.print_exception(error)
        clear_frames(error)
        return failure
    return None


def _printed_bytes() -> int:
    """In a child: return the size of its output until now."""
    with suppress(OSError, ValueError):  # the user's code may have closed it
        sys.stdout.flush()
        return os.fstat(1).st_size
    return 0
