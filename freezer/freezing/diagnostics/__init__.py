"""Diagnostics: errors of torch as one sentence, with the user's line and a remedy.

May import: freezer.errors. Imports no torch.
Read first: messages.py.
"""

from freezer.freezing.diagnostics.messages import NOT_WRITTEN, ROOM, quiet, root_cause, sentence
from freezer.freezing.diagnostics.source_lines import line_of_stack, running_at, warned_at

__all__ = [
    "NOT_WRITTEN",
    "ROOM",
    "line_of_stack",
    "quiet",
    "root_cause",
    "running_at",
    "sentence",
    "warned_at",
]
