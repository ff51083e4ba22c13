"""Build all requested recipes of one model for one target."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from freezer.errors import FreezeError
from freezer.freezing.candidates.build import build
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.capture.capture import Attempt
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.weights import is_large, let_go
from freezer.freezing.recipes.recipes import left_out, select
from freezer.freezing.target.target import Target
from freezer.freezing.target.toolchain import installed_versions
from freezer.hardware.device_classes import PORTABLE
from freezer.limits import Limits

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
            let_go(error, handled)
            builds.errors[recipe.name] = error
    return builds
