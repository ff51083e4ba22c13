"""What surrounds each timing, so that nothing else uses the machine meanwhile. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

alone: Callable[[], AbstractContextManager[None]] = nullcontext
"""Waits until this process has the machine alone. A process that shares its machine with others of
Coldpress sets it, as the children of campaigns do.
"""
