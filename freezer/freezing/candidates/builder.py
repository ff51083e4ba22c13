"""Build a candidate: one recipe, one model, one target."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from freezer.artifact import files_of
from freezer.codec import frozen
from freezer.errors import (
    BuildError,
    FreezeError,
    first_line,
    install_command,
)
from freezer.freezing.candidates.candidate import CANDIDATE, Candidate
from freezer.freezing.candidates.shape_build import Made, ShapeBuild, Tried
from freezer.freezing.capture import REPAIRS, Attempt
from freezer.freezing.choices import select
from freezer.freezing.environment import cleared, installed_versions
from freezer.freezing.models import (
    Subject,
    clear_frames,
    is_large,
)
from freezer.freezing.recipes import (
    EXPORTS,
    KEPT_EAGER,
    RECIPES,
    Recipe,
    made_for,
    own_toolchain,
)
from freezer.freezing.target import Target, toolchain, working_conditions
from freezer.hardware import PORTABLE
from freezer.spec import Point

logger = logging.getLogger("coldpress")


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
        BuildError: a package is missing (code CP-DEPENDENCY), or no captured graph can be lowered.
        LeakError: the compiled code has instructions outside the device class.
    """
    started = time.monotonic()
    recipe = made_for(recipe, target.device_class.kind)
    missing = [name for name in recipe.packages if name not in installed_versions()]
    if missing:
        needed = f"{recipe.name} lacks packages; {install_command(*missing)}"
        raise BuildError(needed, code="CP-DEPENDENCY")
    counts = target.further_threads if further else (target.num_threads,)
    targets = tuple(map(target.at, counts))
    (folder / "payloads").mkdir()
    weights = subject.weights  # before they are discarded
    keeps, attempts = attempts is not None, {} if attempts is None else attempts
    tried = Tried()
    made: list[Made] = []
    with working_conditions(target), cleared():
        for name, point in _shapes(subject, recipe):
            if name not in attempts:
                attempts[name] = Attempt(subject, point, keeps=keeps)
            shape = ShapeBuild(
                attempt=attempts[name],
                recipe=recipe,
                targets=targets,
                folder=folder,
                name=name,
                discard=discard and point is None,
                further=further,
            )
            made += shape.first_that_works(tried)
            recipe = made[-1].recipe  # with nodes that stay in floating point
    candidate = _candidate(subject, recipe, target, folder, made, tried)
    kept = {folder / file.path for file in files_of(candidate.payloads)}
    for file in {*(folder / "payloads").iterdir()} - kept:
        file.unlink()  # weights of builds before a search
    candidate = replace(candidate, weights=weights, build_s=time.monotonic() - started)
    candidate.write()
    return candidate


def _candidate(
    subject: Subject,
    recipe: Recipe,
    target: Target,
    folder: Path,
    made: list[Made],
    tried: Tried,
) -> Candidate:
    """The candidate of all payloads, without the digest of the weights and the build time."""
    last, counts = made[-1], target.thread_counts
    made.sort(key=lambda part: counts.index(part.payload.num_threads or target.num_threads))
    warnings = [warning for part in made for warning in part.warnings]
    return Candidate(
        folder=folder,
        recipe=recipe.name,
        lowering=last.payload.kind,
        capture=last.capture,
        settings=recipe.settings,
        tried=tuple(tried),
        payloads=tuple(part.payload for part in made),
        reports={part.payload.path: part.report for part in made},
        warnings=tuple(dict.fromkeys(warnings)),
        toolchain=own_toolchain(recipe, toolchain(target.device)),
        preserve=subject.kept_names,
        precision=recipe.precision,
    )


def repaired_recipe(recipe: Recipe, repairs: Mapping[str, str]) -> Recipe:
    """The recipe with nodes to repair."""
    ways = tuple(way for way in recipe.ways if way[0] in EXPORTS)
    return replace(recipe, ways=ways, settings={**recipe.settings, REPAIRS: dict(repairs)})


def build_further(
    subject: Subject,
    candidate: Candidate,
    target: Target,
    folder: Path,
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
    recipe = replace(recipe, settings=candidate.settings)  # with repairs, and nodes kept exact
    more = build(subject, recipe, target, folder, further=True)
    candidate.link_files(folder)
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


def _shapes(subject: Subject, recipe: Recipe) -> list[tuple[str, Point | None]]:
    """Name and point of each shape that gets a payload, the most special first; the point None is
    for all sizes.
    """
    varies = any(dim.varies for dim in subject.spec.dims)
    points = subject.points if varies and recipe.by_shape else ()
    shapes: list[tuple[str, Point | None]] = []
    for point in points:
        sizes = [f"{name}{size}" for name, size in point.items()]
        shapes.append(("-".join(sizes), point))
    return [*shapes, ("captured" if recipe.name == KEPT_EAGER.name else "all", None)]


@frozen
class Builds:
    """All builds of a model for one target.

    Attributes:
        folders: folder of each build, by recipe.
        candidates: the candidates.
        errors: error of each recipe that failed.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    errors: dict[str, FreezeError] = field(default_factory=dict)

    @property
    def failures(self) -> Mapping[str, str]:
        """The error of each recipe that made no candidate."""
        return {recipe: str(error) for recipe, error in self.errors.items()}


def build_all(
    subject: Subject,
    target: Target,
    recipes: Iterable[str],
    work: Path,
    kept: Path | None = None,
    precision: Iterable[str] = (),
) -> Builds:
    """Build a candidate by each recipe, in folders `CLASS-RECIPE` of `work`, unless `kept` has it.

    Recipes share captures, unless the model is large. Lower precisions need consent.
    """
    builds = Builds()
    attempts = None if is_large(subject.model) else dict[str, Attempt]()
    handled = sys.exception()
    kind = target.device_class.kind
    installed = installed_versions() if kind == "cpu" else ()
    lower = set(precision) & set(target.device_class.precisions)
    selected = select(recipes, portable=kind == PORTABLE, installed=installed, precision=lower)
    for index, recipe in enumerate(selected, start=1):
        folder = work / f"{target.device_class.name}-{recipe.name}"
        if kept and (kept / folder.name / CANDIDATE).is_file():
            builds.folders[recipe.name] = kept / folder.name
            builds.candidates.append(Candidate.read(kept / folder.name))
            continue
        folder.mkdir()
        builds.folders[recipe.name] = folder
        count = f"{index} of {len(selected)}"
        logger.info("building %s for %s (%s)", recipe.name, target.device_class.name, count)
        try:
            builds.candidates.append(build(subject, recipe, target, folder, attempts=attempts))
        except FreezeError as error:
            clear_frames(error, handled)
            builds.errors[recipe.name] = error
            logger.info("%s was not built: %s", recipe.name, first_line(error))
    return builds
