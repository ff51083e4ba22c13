"""The payloads that an artifact holds besides those that won."""

from __future__ import annotations

import tempfile
from pathlib import Path

from freezer.freezing.judging import Judgement
from freezer.freezing.models import Subject
from freezer.freezing.payload_sets.further_threads import with_further_threads
from freezer.freezing.payload_sets.slow_sizes import with_captured
from freezer.freezing.payload_sets.torch_only import with_torch_only
from freezer.freezing.target import Target


def with_other_payloads(
    subject: Subject, judgement: Judgement, target: Target, folder: Path
) -> Judgement:
    """Add payloads for further thread counts, for sizes where the winner is slower than eager, and
    for use without its engine.

    Args:
        subject, judgement, target: see `judge`. Without a winner the judgement is returned
            unchanged.
        folder: an existing folder for payloads; it must exist until the artifact is written.
    """
    for step in (with_further_threads, with_captured, with_torch_only):
        judgement = step(subject, judgement, target, Path(tempfile.mkdtemp(dir=folder)))
    return judgement
