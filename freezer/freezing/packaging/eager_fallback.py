"""The artifact of a CUDA class whose verdict is `kept-eager`: the captured program, not frozen, on the GPU.

For a CPU class the portable artifact serves instead (docs/contract.md, Verdicts).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

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
    """Whether the class gets an artifact of its own if its verdict is `kept-eager`."""
    return target.device_class.kind == "cuda"


def keep_eager(
    subject: Subject,
    target: Target,
    *,
    dest: Path,
    limits: Limits,
    policy: SamplingPolicy,
    provenance: Mapping[str, str],
    failures: Mapping[str, str],
) -> tuple[Artifact | None, str]:
    """Capture a model on its device, apply the drift gate, and write its artifact with the verdict `kept-eager`.

    Args:
        subject: the model.
        target: a CUDA class.
        limits, policy: see `judge`.
        dest, provenance, failures: see `assemble`.

    Returns:
        The artifact and a sentence. The artifact is None if the model cannot be captured or fails the drift gate.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as folder:
        try:
            candidate = build(subject, KEPT_EAGER, target, Path(folder))
        except FreezeError as error:
            return None, f"no captured program serves: {error}"
        judgement = judge(subject, [candidate], target, limits=limits, policy=policy, on_drift_alone=True)
        if judgement.winner is None:
            return None, f"no captured program serves: {judgement.reason}"
        kept = replace(judgement, verdict="kept-eager")
        artifact = assemble(subject, kept, target, dest=dest, provenance=provenance, failures=failures)
    return artifact, f"the captured program serves ({candidate.capture})"
