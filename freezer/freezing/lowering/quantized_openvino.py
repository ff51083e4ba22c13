"""OpenVINO's IR in int8 by NNCF: as a whole, or with what loses most left in floating point.

Whether a quantized model is good enough is searched on samples that no judge sees. Operators are
ranked once, by the noise that the quantized model adds to their operands, and the shortest prefix
that keeps the budget stays in floating point: about log2 of their number builds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from freezer.compare import Values
from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.lowering.lowered import quantizing
from freezer.freezing.recipes import Settings
from freezer.runtime.accuracy import keeps_budget, measures
from freezer.runtime.native import without_telemetry

if TYPE_CHECKING:
    from openvino import Model

NUM_RANKED = 8
"""Calibration samples on which operators are ranked."""

PRODUCTS = ("Convolution", "ConvolutionBackpropData", "GroupConvolution", "MatMul", "LSTMSequence")
"""Kinds of operators at which a quantized value ends."""

_Arrays = Sequence[Any]


def quantized(
    model: Model, captured: Captured, inputs: tuple[int, ...], settings: Settings
) -> tuple[Model, Sequence[str]]:
    """The model in int8, as far as the budget allows, and names of torch's operators that stay
    exact for it.

    Args:
        model: the converted program.
        captured: has the samples and the budget.
        inputs: the program's input for each input of the model.
        settings: settings of the recipe, with OpenVINO's properties.

    Raises:
        BuildError: NNCF is missing (code CP-DEPENDENCY), or fails (code CP-PRECISION).
    """

    def arrays(call: Sequence[Tensor]) -> list[Any]:
        return [call[index].numpy() for index in inputs]

    calibration = list(map(arrays, captured.calibration))
    search = list(map(arrays, captured.search))
    exact = _answers(model, search, {**settings["openvino"], "INFERENCE_PRECISION_HINT": "f32"})

    def keeps(made: Model) -> bool:
        answers = _answers(made, search, settings["openvino"])
        return keeps_budget(_measured(exact, answers, captured.budget), captured.budget)

    with quantizing("nncf"):
        whole = _by_nncf(model, calibration, ())
        if not captured.budget or keeps(whole):
            return whole, ()
        order = _worst_first(whole, calibration[:NUM_RANKED])
        made = _fewest_exact(order, lambda exact: _by_nncf(model, calibration, exact), keeps)
        return made or (whole, ())


def _fewest_exact(
    order: Sequence[str],
    make: Callable[[Sequence[str]], Model],
    keeps: Callable[[Model], bool],
) -> tuple[Model, Sequence[str]] | None:
    """The model with the shortest prefix of operators in floating point that keeps the budget, and
    names of torch's operators in it; None if none does.
    """
    found, low, high = None, 1, len(order)
    while low < high:
        middle = (low + high) // 2
        made = make(order[:middle])
        if keeps(made):
            found, high = (made, [name.rpartition("/")[0] for name in order[:middle]]), middle
        else:
            low = middle + 1
    return found


def _by_nncf(model: Model, calls: Sequence[_Arrays], exact: Sequence[str]) -> Model:
    """The model quantized by NNCF, without the operators that stay exact."""
    os.environ.setdefault("NNCF_CI", "1")  # it sends no telemetry then
    with without_telemetry():
        import nncf
    kinds = {op.get_type_name() for op in model.get_ops()}
    is_transformer = "ScaledDotProductAttention" in kinds or {"Softmax", "MVN"} <= kinds
    with quiet("nncf"), redirect_stdout(StringIO()):  # it shows its progress
        return nncf.quantize(
            model,
            nncf.Dataset(calls),
            subset_size=len(calls),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            ignored_scope=nncf.IgnoredScope(names=list(exact)) if exact else None,
        )


def _answers(model: Model, calls: Sequence[_Arrays], properties: Any) -> list[list[Values]]:
    import openvino

    compiled = openvino.Core().compile_model(model.clone(), "CPU", dict(properties))
    found = []
    for call in calls:
        arrays = [np.array(array) for array in compiled(list(call)).values()]
        found.append([Values.of(array) for array in arrays if array.dtype.kind == "f"])
    return found


def _measured(
    exact: Sequence[Sequence[Values]], answers: Sequence[Sequence[Values]], budget: Any
) -> dict[str, list[float]]:
    """The measures of each sample that need no function of the user."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    names = [name.removesuffix("_min") for name in budget]
    for before, after in zip(exact, answers, strict=True):
        for name, value in measures(before, after, names).items():
            samples[name].append(value)
    return samples


def _readers(op: Any) -> set[str]:
    """The operators that read a quantized value, also through others, up to the first products."""
    found: set[str] = set()
    waiting = [op]
    while waiting:
        for port in waiting.pop().outputs():
            for target in port.get_target_inputs():
                reader = target.get_node()
                name = reader.get_friendly_name()
                if name in found or reader.get_type_name() in ("FakeQuantize", "Result"):
                    continue
                found.add(name)
                if reader.get_type_name() not in PRODUCTS:
                    waiting.append(reader)
    return found


def _worst_first(model: Model, calls: Sequence[_Arrays]) -> list[str]:
    """The quantized operators, those first whose operands get most noise for their size."""
    import openvino
    from openvino import opset13 as ops

    model = model.clone()
    pairs, users = [], []
    for op in model.get_ordered_ops():
        if op.get_type_name() == "FakeQuantize":
            pairs += [op.input_value(0), op.output(0)]
            users.append(_readers(op))
    probed = openvino.Model([ops.result(port) for port in pairs], model.get_parameters(), "probed")
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(probed, "CPU", hint)
    noise: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        outputs = list(compiled(list(call)).values())
        for names, before, after in zip(users, outputs[::2], outputs[1::2], strict=True):
            signal = float(np.square(before).mean()) or 1.0
            for name in names:
                noise[name] += float(np.square(after - before).mean()) / signal
    return sorted(noise, key=noise.__getitem__, reverse=True)
