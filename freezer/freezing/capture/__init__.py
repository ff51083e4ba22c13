"""Capture: make a graph of a model by export, trace, script or conversion, and check that it is
equivalent to the model.

May import: freezer.freezing.target and below.
Read first: attempt.py.
"""

from freezer.freezing.capture.attempt import (
    Attempt,
)
from freezer.freezing.capture.program import (
    Captured,
)

__all__ = [
    "Attempt",
    "Captured",
]
