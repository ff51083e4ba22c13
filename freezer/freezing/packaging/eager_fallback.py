"""What serves a class for GPUs where nothing that was frozen beats eager: the captured program, unfrozen, on that device.

For a CPU class the portable artifact serves; on a machine with a GPU that would be the wrong device (docs/contract.md, Verdicts).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.artifact.folder import Artifact
from freezer.errors import FreezeError
from freezer.freezing.candidates.build import build
from freezer.freezing.models.subject import Subject
from freezer.freezing.packaging.assemble import assemble
from freezer.freezing.recipes.recipes import KEPT_EAGER
from freezer.freezing.target.target import Target
from freezer.freezing.validation.judge import judge
from freezer.limits import Limits, SamplingPolicy

VERDICT = "kept-eager"


def serves_itself(target: Target) -> bool:
    """Whether a class is served by a program of its own where its verdict is `kept-eager`."""
    return target.device_class.kind == "cuda"


def keep_eager(
    subject: Subject,
    target: Target,
    *,
    work: Path,
    out: Path,
    limits: Limits,
    policy: SamplingPolicy,
    provenance: Mapping[str, Any],
    failures: Mapping[str, str] | None = None,
) -> tuple[Artifact | None, str]:
    """Capture a model on its device, hold the program to the drift gate, and write its artifact, whose verdict is `kept-eager`.

    Args:
        subject: whose verdict is `kept-eager`.
        target: of a class for GPUs.
        work: an existing folder, for the candidate.
        out: as of `freeze`.
        limits, policy, provenance, failures: as of `assemble`.

    Returns:
        The artifact, and a sentence; no artifact where the model cannot be captured, or what was captured does not pass.
    """
    folder = work / f"{target.device_class.name}-{KEPT_EAGER.name}"
    folder.mkdir()
    try:
        candidate = build(subject, KEPT_EAGER, target, folder)
    except FreezeError as error:
        return None, f"no captured program serves: {error}"
    judgement = judge(subject, [candidate], target, limits=limits, policy=policy, on_drift_alone=True)
    if judgement.winner is None:
        return None, f"no captured program serves: {judgement.reason}"
    settings: dict[str, Any] = {"limits": limits, "policy": policy, "provenance": provenance, "failures": failures}
    artifact = assemble(subject, judgement, target, dest=out, verdict=VERDICT, **settings)
    return artifact, f"the captured program serves ({candidate.capture})"
