"""The artifact that serves now, for a judge: brought from the store, and opened as a deployment
does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.errors import IncompatibleError, IntegrityError, NotPublishedError
from freezer.files import make_folder
from freezer.freezing.in_hand import PREVIOUS, take
from freezer.hardware import PORTABLE
from freezer.store import Store
from pipeline.worker.requests import JudgeRequest

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
