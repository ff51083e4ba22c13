"""The payloads that an artifact holds besides those that won. READ THIS FIRST."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from freezer.freezing.judging import Judgement, Session
from freezer.freezing.payload_sets.further_threads import with_further_threads
from freezer.freezing.payload_sets.slow_sizes import with_captured
from freezer.freezing.payload_sets.torch_only import with_torch_only

STEPS: tuple[Callable[[Session, Judgement, Path], Judgement], ...] = (
    with_further_threads,  # for the thread counts that did not decide
    with_captured,  # for sizes where the winner is slower than eager
    with_torch_only,  # for use without the winner's engine
)


def with_other_payloads(session: Session, judgement: Judgement, folder: Path) -> Judgement:
    """Add the payloads that serve where the deciding one does not.

    Args:
        session: the session of the judgement.
        judgement: the judgement; without a winner it is returned unchanged.
        folder: an existing folder for payloads; it must exist until the artifact is written.
    """
    for step in STEPS:
        judgement = step(session, judgement, Path(tempfile.mkdtemp(dir=folder)))
    return judgement
