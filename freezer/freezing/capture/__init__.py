"""Capture: make a graph of a model by export, trace, script or conversion, and check that it is
equivalent to the model.

May import: freezer.freezing.target and below.
Read first: attempt.py.
"""

from freezer.freezing.capture.attempt import (
    REPAIRS,
    Attempt,
    Repair,
    repaired,
)
from freezer.freezing.capture.equivalence import copy_of
from freezer.freezing.capture.export import export_at
from freezer.freezing.capture.program import (
    Captured,
    Texts,
)

__all__ = [
    "REPAIRS",
    "Attempt",
    "Captured",
    "Repair",
    "Texts",
    "copy_of",
    "export_at",
    "repaired",
]
