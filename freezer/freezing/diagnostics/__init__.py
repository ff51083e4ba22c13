"""Diagnostics: errors of torch as one sentence, with the user's line and a remedy.

May import: freezer.errors. Imports no torch.
Read first: messages.py.
"""

from freezer.freezing.diagnostics.messages import (
    export_sentence,
    inductor_sentence,
    onnx_sentence,
    openvino_sentence,
    run_sentence,
    script_sentence,
    trace_sentence,
)
from freezer.freezing.diagnostics.remedies import NOT_WRITTEN, ROOM
from freezer.freezing.diagnostics.source_lines import (
    running_at,
    warned_at,
)

__all__ = [
    "NOT_WRITTEN",
    "ROOM",
    "export_sentence",
    "inductor_sentence",
    "onnx_sentence",
    "openvino_sentence",
    "run_sentence",
    "running_at",
    "script_sentence",
    "trace_sentence",
    "warned_at",
]
