"""Store an ExportedProgram as it was captured; it runs wherever torch runs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch

from freezer.artifact import FreezingReport, KeptTensor, stored_as_captured
from freezer.errors import BuildError
from freezer.freezing.capture import Captured
from freezer.freezing.lowering.operators import fx_operators
from freezer.freezing.lowering.result import Lowered
from freezer.freezing.target import Target
from freezer.runtime.loaders import on_first

SUFFIX = ".pt2"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Write a .pt2 file that torch.export.load reads, without the program's example inputs, which
    are pickled.

    Raises:
        BuildError: the program cannot be serialized.
    """
    program = copy(on_first(captured.program, target.device))
    program.example_inputs = None
    try:
        torch.export.save(program, str(path))
    except Exception as error:
        raise BuildError(f"torch.export.save: {type(error).__name__}: {error}") from error
    ops = dict(fx_operators(captured.program.graph_module))
    report = FreezingReport(
        ops_before=ops,
        ops_after=ops,
        kept=tuple(
            KeptTensor(name=captured.source_name(name), reason="`forward` changes it")
            for name in captured.mutates
        ),
        notes=(stored_as_captured(len(captured.program.state_dict)),),
    )
    return Lowered(report=report)
