"""Builds kept beside an artifact folder whose speed was not measured: another freeze into the same
folder repeats only the judge.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from freezer.artifact import Artifact
from freezer.errors import ColdpressError
from freezer.files import check_folder
from freezer.freezing.candidates.candidate import architecture_digest
from freezer.freezing.models import Subject
from freezer.freezing.target import Target

OPTIONS = "options.json"
"""File of the command `coldpress freeze` with its options."""

_KEY = "builds.key"
"""File with the digest of everything that the builds of a class depend on."""


def builds_of(out: Path) -> Path:
    """The folder beside an artifact folder for its builds."""
    return out.with_name(f"{out.name}.builds")


def check_out(out: Path, name: str) -> None:
    """Check that a freeze can write a folder: as `check_folder`, or it holds an artifact whose
    speed was not measured, which is replaced.
    """
    if not _is_unmeasured(out):
        check_folder(out, name)


def clear_out(out: Path) -> None:
    """Remove the artifact of a folder if its speed was not measured."""
    if _is_unmeasured(out):
        shutil.rmtree(out)


def _is_unmeasured(out: Path) -> bool:
    """Whether a folder has an artifact that serves until the timing is repeated: an unstable one,
    or `portable` beside kept builds.
    """
    with suppress(ColdpressError):
        return Artifact.read(out).manifest.verdict == "unstable" or bool(_kept(out))
    return False


def _kept(out: Path) -> list[Path]:
    """The folders of classes with kept builds."""
    return [key.parent for key in builds_of(out).glob(f"*/{_KEY}")]


def drop_builds(out: Path) -> None:
    """Remove the kept builds; nothing else in that folder is ours."""
    for folder in _kept(out):
        shutil.rmtree(folder)
    (builds_of(out) / OPTIONS).unlink(missing_ok=True)
    with suppress(OSError):
        builds_of(out).rmdir()


def kept_builds(out: Path, subject: Subject, target: Target) -> Path | None:
    """The folder with the builds of a class that an earlier freeze kept; None if there is none, or
    they are of another model, target or toolchain.
    """
    folder = builds_of(out) / target.device_class.name
    with suppress(OSError):
        if (folder / _KEY).read_text() == _key(subject, target):
            return folder
    return None


def keep_builds(out: Path, subject: Subject, target: Target, builds: Iterable[Path]) -> None:
    """Move the folders of builds to where `kept_builds` finds them, and remove others."""
    folder = builds_of(out) / target.device_class.name
    if kept_builds(out, subject, target) is None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for build in builds:
        if build.parent != folder:
            shutil.move(build, folder / build.name)
    (folder / _KEY).write_text(_key(subject, target))


def _key(subject: Subject, target: Target) -> str:
    parts = [
        architecture_digest(subject, target),
        subject.weights,
        target.thread_counts,
        subject.kept_names,
        subject.reset,
        subject.held_out.digest if subject.held_out else None,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
