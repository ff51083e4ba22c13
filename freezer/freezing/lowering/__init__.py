"""Lowering: turn a captured graph into a payload. One package or module per backend.

May import: freezer.freezing.capture and below.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from freezer.artifact import PayloadKind
from freezer.freezing.capture import Captured
from freezer.freezing.lowering import (
    exported_programs,
    onnx_runtime,
    open_vino,
    torchscript_files,
)
from freezer.freezing.lowering.exported_programs import (
    NodeNames,
    decomposed,
    forget_origins,
    known_names,
    names_in,
    origin_of,
)
from freezer.freezing.lowering.inductor import compilation
from freezer.freezing.lowering.inductor.compilation import compiler_problem
from freezer.freezing.lowering.inductor.objects import objects_kept_in
from freezer.freezing.lowering.inductor.passes import (
    passes_of,
    run_with_outputs,
)
from freezer.freezing.lowering.lowered import (
    Lowered,
    Phases,
    captured_texts,
    check_operators,
    timed,
)
from freezer.freezing.lowering.onnx_runtime import optimized, to_onnx
from freezer.freezing.lowering.open_vino import int8_model, to_openvino
from freezer.freezing.recipes import Settings
from freezer.freezing.target import Target

__all__ = [
    "LOWERINGS",
    "NodeNames",
    "Phases",
    "captured_texts",
    "check_operators",
    "compiler_problem",
    "decomposed",
    "forget_origins",
    "int8_model",
    "known_names",
    "names_in",
    "objects_kept_in",
    "optimized",
    "origin_of",
    "passes_of",
    "run_with_outputs",
    "timed",
    "to_onnx",
    "to_openvino",
]


class Lowering(Protocol):
    """Turns a captured graph into a payload file. A module with these two names is one.

    Attributes:
        SUFFIX: suffix of the payload file.
    """

    SUFFIX: str

    def build(
        self,
        captured: Captured,
        path: Path,
        target: Target,
        settings: Settings,
    ) -> Lowered:
        """Write one payload file.

        Args:
            captured: the graph; tensors that it owns may be freed.
            path: the file to write.
            target: device class and thread count.
            settings: the recipe's settings, which are also used to open the payload.

        Raises:
            BuildError: the backend cannot lower the graph.
        """


LOWERINGS: Mapping[PayloadKind, Lowering] = {
    "torchscript": torchscript_files,
    "inductor": compilation,
    "exported": exported_programs,
    "onnxruntime": onnx_runtime,
    "openvino": open_vino,
}
"""The module that builds each kind of payload."""
