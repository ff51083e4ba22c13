"""Write what a judgement publishes: the winner, or of a GPU class that keeps eager the captured
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from freezer.artifact import Artifact
from freezer.errors import FreezeError
from freezer.files import scratch_folder
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
    """Write the winner of a judgement; for a CUDA class that keeps eager, the captured program.

    For a CPU class that keeps eager the portable artifact serves (docs/reference/contract.md,
    Verdicts).

    Args:
        session, judgement, dest, provenance, failures: see `assemble`.

    Returns:
        The artifact, or None; and what to add to the reason.
    """
    if judgement.winner is not None:
        return assemble(
            session,
            judgement,
            dest=dest,
            provenance=provenance,
            failures=failures,
        ), ""
    if judgement.verdict != "kept-eager" or session.target.device_class.kind != "cuda":
        return None, ""
    return keep_eager(
        session,
        dest=dest,
        provenance=provenance,
        failures=failures,
    )


def keep_eager(
    session: Session,
    *,
    dest: Path,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[Artifact | None, str]:
    """Write the captured program, not frozen, if it can be captured and passes the drift gate; see
    `write_judged`.
    """
    dest.parent.mkdir(
        parents=True,
        exist_ok=True,
    )
    with scratch_folder(place=dest.parent) as folder:
        try:
            captured = build(session.subject, KEPT_EAGER, session.target, Path(folder))
        except FreezeError as error:
            return None, f"; no captured program serves: {error}"
        policy = replace(session.policy, min_samples=0)  # which only the objective p95 raises
        session = replace(
            session,
            on_drift_alone=True,
            objective="p50",
            task_metric=None,
            policy=policy,
        )
        judgement = judge(session, [captured])
        if judgement.winner is None:
            return None, f"; no captured program serves: {judgement.reason}"
        judgement = replace(judgement, verdict="kept-eager")
        artifact = assemble(
            session,
            judgement,
            dest=dest,
            provenance=provenance,
            failures=failures,
        )
    return artifact, f"; the captured program serves ({captured.capture})"
