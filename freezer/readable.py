"""The code and the graph of an artifact's model, from its evidence. Imports no torch."""

from __future__ import annotations

from pathlib import PurePosixPath

from freezer.artifact import Artifact
from freezer.errors import NotPublishedError
from freezer.manifest import Payload


def readable(artifact: Artifact, kind: str, *, captured: bool) -> str:
    """The code or the graph of every payload, each under its path where there are several.

    Args:
        artifact: whose texts are verified before they are read.
        kind: `code` or `graph`.
        captured: of the model as it was captured, not as it was frozen.

    Raises:
        NotPublishedError: the artifact has no such text.
        IntegrityError: a text is not what was published.
    """
    parts = []
    for payload in artifact.manifest.payloads:
        text = _text(artifact, payload, kind, captured=captured)
        parts.append(f"# {payload.path}\n{text}" if len(artifact.manifest.payloads) > 1 else text)
    return "\n".join(parts)


def _text(artifact: Artifact, payload: Payload, kind: str, *, captured: bool) -> str:
    stem = PurePosixPath(payload.path).stem
    names = [f"evidence/{stem}-captured-{kind}.txt"]
    if not captured:
        names.insert(0, f"evidence/{stem}-{kind}.txt")
        if artifact.manifest.recipe["settings"].get("freeze", True):
            names.pop()  # only where nothing was frozen is the captured program what is served
    held = {item.path: item for item in artifact.manifest.files}
    for name in names:
        if name in held:
            artifact.verify((held[name],))
            return (artifact.folder / name).read_text()
    what = "captured" if captured else "frozen"
    raise NotPublishedError(
        f"{artifact.manifest.model} for {artifact.manifest.device_class} holds no {kind} of the {what} model for {payload.path} "
        f"({names[0]}); earlier releases wrote none, and not every recipe has one: freeze the model anew"
    )
