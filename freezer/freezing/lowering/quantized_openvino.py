"""OpenVINO's models in int8, by NNCF."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING

from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.lowering.lowered import quantizing
from freezer.freezing.lowering.source_nodes import known_names, operators_of
from freezer.runtime.loaders import without_telemetry

if TYPE_CHECKING:
    from openvino import Model


def quantized(
    model: Model, inputs: Sequence[int], names: Mapping[str, str], captured: Captured
) -> Model:
    """The model in int8, without the operators of nodes that stay exact.

    Args:
        model: the converted program.
        inputs: the program's input for each input of the model.
        names: source node by name of a value.
        captured: has the samples, and the nodes that stay exact.

    Raises:
        BuildError: NNCF is missing (code CP-DEPENDENCY), or fails (code CP-PRECISION).
    """
    operators = []
    for op in model.get_ordered_ops():
        if op.get_type_name() not in ("Parameter", "Result", "Constant"):
            known = [known_names(port, names) for port in op.outputs()]
            read = [value.get_node().get_friendly_name() for value in op.input_values()]
            name = op.get_friendly_name()
            operators.append((name, [*chain.from_iterable(known), name], read))
    exact = operators_of(captured.exact, operators, names)
    calls = [[call[index].numpy() for index in inputs] for call in captured.calibration]
    kinds = {op.get_type_name() for op in model.get_ops()}
    is_transformer = "ScaledDotProductAttention" in kinds or {"Softmax", "MVN"} <= kinds
    os.environ.setdefault("NNCF_CI", "1")  # it sends no telemetry then
    with quantizing("nncf"), quiet("nncf"), redirect_stdout(StringIO()):  # it shows its progress
        with without_telemetry():
            import nncf
        return nncf.quantize(
            model,
            nncf.Dataset(calls),
            subset_size=len(calls),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            ignored_scope=nncf.IgnoredScope(names=exact, validate=False),
        )
