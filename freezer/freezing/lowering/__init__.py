"""Lowering: turn a captured graph into a payload. One package or module per backend.

May import: freezer.freezing.capture and below.
Read first: lowerings.py.
"""

from freezer.freezing.lowering.lowered import (
    captured_texts,
    timed,
)
from freezer.freezing.lowering.lowerings import (
    LOWERINGS,
)
from freezer.freezing.lowering.operators import (
    check_operators,
)

__all__ = [
    "LOWERINGS",
    "captured_texts",
    "check_operators",
    "timed",
]
