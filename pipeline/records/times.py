"""Times for people and programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal


def iso(seconds: float, *, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Format seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec)
