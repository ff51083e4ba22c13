"""Lowering: turn a captured graph into a payload. One package or module per backend.

May import: freezer.freezing.capture and below.
Read first: lowerings.py.
"""

from freezer.freezing.lowering.lowerings import (
    LOWERINGS,
)
from freezer.freezing.lowering.operators import (
    check_operators,
)
from freezer.freezing.lowering.readable import (
    captured_texts,
)
from freezer.freezing.lowering.result import (
    timed,
)

__all__ = [
    "LOWERINGS",
    "captured_texts",
    "check_operators",
    "timed",
]
