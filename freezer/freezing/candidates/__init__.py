"""Candidates: apply one recipe to one model.

May import: freezer.freezing.explaining and below.
Read first: builder.py.
"""

from freezer.freezing.candidates.builder import (
    Builds,
    build,
    build_all,
    build_further,
    repaired_recipe,
)
from freezer.freezing.candidates.candidate import (
    EVIDENCE,
    OPTIONS,
    Candidate,
    architecture_digest,
    builds_of,
    check_out,
    clear_out,
    drop_builds,
    keep_builds,
    kept_builds,
)

__all__ = [
    "EVIDENCE",
    "OPTIONS",
    "Builds",
    "Candidate",
    "architecture_digest",
    "build",
    "build_all",
    "build_further",
    "builds_of",
    "check_out",
    "clear_out",
    "drop_builds",
    "keep_builds",
    "kept_builds",
    "repaired_recipe",
]
