"""Write what a judgement publishes: the winner, or of a GPU class that keeps eager the captured
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from freezer.artifact import Artifact
from freezer.errors import FreezeError
from freezer.files import make_folder, scratch_folder
from freezer.freezing.candidates import build
from freezer.freezing.judging import Judgement, Session, judge
from freezer.freezing.packaging import assemble
from freezer.freezing.recipes import KEPT_EAGER


def write_judged(
    session: Session,
    judgement: Judgement,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[Artifact | None, str]:
    """Write the winner of a judgement; for a CUDA class that keeps eager, the captured program, if
    it can be captured and passes the drift gate.

    For a CPU class that keeps eager the portable artifact serves (docs/reference/contract.md).

    Args:
        session, judgement, dest, provenance, failures: see `assemble`.

    Returns:
        The artifact, or None; and what to add to the reason.
    """
    write = partial(assemble, dest=dest, provenance=provenance, failures=failures)
    if judgement.winner is not None:
        return write(session, judgement), ""
    if judgement.verdict != "kept-eager" or session.target.device_class.kind != "cuda":
        return None, ""
    make_folder(dest.parent)
    with scratch_folder(place=dest.parent) as folder:
        try:
            captured = build(session.subject, KEPT_EAGER, session.target, folder)
        except FreezeError as error:
            return None, f"; no captured program serves: {error}"
        policy = replace(session.policy, min_samples=0)  # which only the objective p95 raises
        session = replace(session, on_drift_alone=True, objective="p50", policy=policy)
        judgement = judge(replace(session, task_metric=None), [captured])
        if judgement.winner is None:
            return None, f"; no captured program serves: {judgement.reason}"
        artifact = write(session, replace(judgement, verdict="kept-eager"))
    return artifact, f"; the captured program serves ({captured.capture})"
