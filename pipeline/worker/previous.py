"""Artifacts that a worker brings from the store and opens as a deployment does: the one that serves
now, for a judge, and `portable`, to check it on another architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.errors import CanaryError, IncompatibleError, IntegrityError, NotPublishedError
from freezer.files import make_folder
from freezer.freezing.in_hand import PREVIOUS, take
from freezer.hardware import PORTABLE
from freezer.spec import Limits
from freezer.store import Store
from pipeline.worker.requests import JudgeRequest
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.task_child import bounds_of
from pipeline.workspace import staging_folder, workplace

if TYPE_CHECKING:
    from freezer.freezing.judging import Incumbent
    from freezer.freezing.target import Target

FOLDER = "previous"
"""Folder of a judge's staging with the artifact of each class."""


def bring_previous(request: JudgeRequest, staging: Path) -> tuple[str | None, str]:
    """Bring the artifact that `latest` has for the class of a judge.

    Args:
        request: of the judge.
        staging: folder of the judge.

    Returns:
        The digest of its image manifest, or None, and the reason if it cannot be read.

    Raises:
        StoreUnreachableError: the store cannot be read.
    """
    if request.device_class == PORTABLE and not request.inherits:
        return None, ""
    store = Store.open(request.store, create=True)
    try:
        version = store.version(request.entry.name)
        image = version.images.get(request.device_class)
        if image is None:
            return None, ""
        folder = staging / FOLDER / request.device_class
        make_folder(folder)
        store.materialize(version, request.device_class, folder)
    except NotPublishedError:
        return None, ""
    except IntegrityError as error:
        return None, str(error)
    return image.digest, ""


def open_previous(digest: str, staging: Path, target: Target) -> Incumbent:
    """Open the artifact that `bring_previous` brought, as a deployment does, to learn whether it
    serves here.

    Args:
        digest: of its image manifest.
        staging: folder of the judge.
        target: of the judge.
    """
    from freezer.freezing.judging import Incumbent
    from freezer.serving.load import load

    made_for = target.device_class
    artifact = Artifact.read(staging / FOLDER / made_for.name)
    problem = None
    device = str(target.device) if made_for.kind == "cuda" else None
    take(PREVIOUS, "opening")
    try:
        load(
            artifact.folder,
            device_class=made_for.name,
            threads=target.num_threads,
            device=device,
            strict=True,
        )
    except IncompatibleError as error:
        problem = "; ".join(map(str, error.ladder))
    take("")
    return Incumbent(
        folder=artifact.folder,
        manifest=artifact.manifest,
        digest=digest,
        problem=problem,
    )


def check_portable(store: str, name: str, limits: Limits) -> tuple[str, bool]:
    """Check on this machine that a judged artifact of `portable` gives its golden outputs.

    Args:
        store: URI of the store.
        name: of the folder of the judged artifact.
        limits: of its entry.

    Returns:
        What was wrong, empty if nothing, and whether an output differs.
    """
    place = workplace(store)
    with staging_folder(place.root) as staging:
        folder = place.folder("judged", name) if place.remote is None else staging / "judged"
        place.bring("judged", name, folder)
        end = run_isolated(
            _difference,
            (folder / "artifact",),
            folder=staging,
            bounds=bounds_of(limits, PORTABLE),
        )
    if end.failure is not None:
        return f"{end.failure.kind}: {end.failure.message}", False
    difference: str = end.value
    return difference, bool(difference)


def _difference(folder: Path) -> str:
    """In the child: which golden output of an artifact differs here; empty if none does."""
    from freezer.serving.verify import verify

    try:
        verify(folder, device_class=PORTABLE)
    except CanaryError as error:
        return str(error)
    return ""
