"""ONNX Runtime: an ONNX file, optimized ahead of time as far as that does not depend on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from freezer.errors import BuildError, MissingDependencyError
from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import quiet
from freezer.freezing.environment import installed_versions
from freezer.freezing.lowering.exported_programs import check_real, output_orders, report_before
from freezer.freezing.lowering.integers import check_integers
from freezer.freezing.lowering.lowered import GRAPH, Lowered, build_errors, check_stateless, timed
from freezer.freezing.lowering.stable_forms import with_stable_forms
from freezer.freezing.recipes import ENGINE_PACKAGES, Settings
from freezer.freezing.target import Target, check_unlimited
from freezer.packages import install_command
from freezer.runtime.loaders import OUTPUT_ORDERS, session_options

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

SUFFIX = ".onnx"


def build(
    captured: Captured,
    path: Path,
    target: Target,
    settings: Settings,
) -> Lowered:
    """Convert a program to ONNX and optimize it with ONNX Runtime at the level "extended".

    The level above it, which the loader applies, chooses layouts for the instruction set at hand.

    Raises:
        BuildError: calls change buffers (code CP-STATE), a package is missing (code CP-DEPENDENCY),
            the class is not that of this machine (codes CP-DEVICE-CLASS and
            CP-BETTER-CPU), or the program cannot be converted, such as one with over 2 GB of
            weights.
    """
    check_stateless(captured, "onnxruntime")
    missing = [name for name in ENGINE_PACKAGES["onnxruntime"] if name not in installed_versions()]
    if missing:
        raise BuildError(
            f"onnxruntime lacks packages; {install_command(*missing)}",
            code=MissingDependencyError.code,
        )
    with build_errors("onnxruntime"):
        check_unlimited(target, "ONNX Runtime")
        return _build(captured, path, settings)


def _build(captured: Captured, path: Path, settings: Settings) -> Lowered:
    check_real(captured.program, "onnxruntime")
    check_integers(captured, "onnxruntime", in_64_bits=True)
    report, phases_s = report_before(captured), dict[str, float]()
    orders = output_orders(captured.program)
    with timed(phases_s, "convert"):
        model = to_onnx(captured.program)
    _lay_out(model, orders)
    with timed(phases_s, "optimize"):
        model = optimized(
            model,
            path.parent,
            settings,
        )
    model.metadata_props.add(key=OUTPUT_ORDERS, value=json.dumps(orders))
    path.write_bytes(model.SerializeToString())
    report = replace(report, ops_after=_operators(model.graph), phases_s=phases_s)
    return Lowered(report=report, texts={GRAPH: _text(model)})


def to_onnx(program: torch.export.ExportedProgram) -> ModelProto:
    """The program as an ONNX ModelProto."""
    with (
        quiet("torch.onnx", "onnx_ir", "onnxscript"),
        torch.no_grad(),
    ):  # with gradients attention is decomposed into operators whose results have other strides
        made = torch.onnx.export(
            with_stable_forms(program),
            dynamo=True,
            verbose=False,
        )
    assert made is not None, "it is returned if no file is named"
    return made.model_proto


def _lay_out(model: ModelProto, orders: Sequence[Sequence[int] | None]) -> None:
    """Let the file return each output in eager's order of dims in memory.

    The loader gives the dims their places again.
    """
    from onnx import helper

    for output, order in zip(model.graph.output, orders, strict=True):
        if order is None:
            continue
        source, output.name = output.name, f"{output.name}_laid_out"
        node = helper.make_node(
            "Transpose",
            [source],
            [output.name],
            perm=order,
        )
        model.graph.node.append(node)
        shape = output.type.tensor_type.shape
        dims = [dim.SerializeToString() for dim in shape.dim]
        del shape.dim[:]
        for index in order:
            shape.dim.add().ParseFromString(dims[index])


def optimized(model: ModelProto, folder: Path, settings: Settings) -> ModelProto:
    """The model after ONNX Runtime's optimizations that hold on every CPU."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / "optimized.onnx"
        options = session_options(settings, 1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        return onnx.load(str(target))


def _operators(graph: GraphProto) -> Counter[str]:
    """Number of operators by kind in a graph and in its branches and loops: `Conv`,
    `com.microsoft.FusedConv`.
    """
    found: Counter[str] = Counter()
    for node in graph.node:
        found[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
        for item in node.attribute:
            for inner in (item.g, *item.graphs):
                found += _operators(inner)
    return found


def _text(model: ModelProto) -> str:
    """The graph, with the names and shapes of its weights. Removes the weights from the model."""
    from onnx import printer

    weights = "".join(f"# {item.name} {list(item.dims)}\n" for item in model.graph.initializer)
    del model.graph.initializer[:]
    return f"{printer.to_text(model)}\n\n# weights\n{weights}"
