"""An ExportedProgram as it was captured: runs anywhere torch runs, optimized for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from freezer.capture import Captured
from freezer.errors import BuildError
from freezer.lowering.exported_report import report_stored
from freezer.report import Lowered
from freezer.target import Target

SUFFIX = ".pt2"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Write a .pt2 file that torch.export.load reads.

    Raises:
        BuildError: the program cannot be serialized.
    """
    try:
        torch.export.save(captured.program, str(path))
    except Exception as error:
        raise BuildError(f"torch.export.save: {type(error).__name__}: {error}") from error
    prefix = "model." if captured.convention == "flat" else ""
    return Lowered(report=report_stored(captured.program, captured.mutates, prefix=prefix))


def open_payload(path: Path, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A runner of the program. The file is unpickled in part: its digest must have been verified."""
    module: Callable[..., Any] = torch.export.load(str(path)).module()
    return module
