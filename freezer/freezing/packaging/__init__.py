"""Packaging: assemble the artifact folder, with its evidence.

May import: freezer.freezing.payload_sets and below.
Read first: writer.py.
"""

from freezer.freezing.packaging.evidence import (
    clear_evidence,
    evidence_of,
    write_refused,
)
from freezer.freezing.packaging.writer import (
    assemble,
)

__all__ = [
    "assemble",
    "clear_evidence",
    "evidence_of",
    "write_refused",
]
