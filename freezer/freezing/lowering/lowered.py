"""What all lowerings share: their result, its wall times and readable texts, errors, and the
operators of captured programs, of which those that only the model's own code registers are
rejected.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from freezer.artifact import MEDIA_WEIGHTS, FileRef, FreezingReport, KeptTensor, PayloadKind
from freezer.codec import frozen
from freezer.errors import BuildError, UsageError, described, first_line
from freezer.files import digest_file
from freezer.freezing.capture import Captured, Texts
from freezer.freezing.diagnostics import root_cause, sentence
from freezer.freezing.recipes import Settings

Phases = dict[str, float]
"""Wall time of each phase of a build, in seconds."""

Product = tuple[str, str]
"""Name and precision of a convolution or matrix product."""


@contextmanager
def timed(phases_s: Phases, name: str) -> Iterator[None]:
    """Record the wall time of the block in seconds, unless it raises."""
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


@contextmanager
def build_errors(engine: Literal["inductor", "onnxruntime", "openvino"]) -> Iterator[None]:
    """Make every error of the block a BuildError that names the engine; one stays of its kind."""
    try:
        yield
    except BuildError as error:
        raise type(error)(f"{engine}: {error}", code=error.code) from error
    except UsageError as error:
        raise BuildError(f"{engine}: {error}", code=error.code) from error
    except Exception as error:
        raise BuildError(f"{engine}: {sentence(root_cause(error), engine)}") from error


def check_stateless(captured: Captured) -> None:
    """Reject a program whose calls change buffers: most engines keep no state.

    Raises:
        BuildError: calls change buffers; code CP-STATE.
    """
    if captured.mutates:
        changed = ", ".join(map(captured.source_name, captured.mutates))
        raise BuildError(
            f"a call changes {changed}, and the payload would lose it; torchscript-frozen keeps"
            " state",
            code="CP-STATE",
        )


@frozen
class Lowered:
    """Result of a lowering.

    Attributes:
        report: the report, without sizes, time of the capture, and memory, which the build adds.
        texts: readable forms of the frozen model by file name: `code.txt`, `graph.txt`.
        layouts: layout of packed weights by dtype.
        weights: the file of the weights, if they are apart from the payload.
    """

    report: FreezingReport
    texts: Texts = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    weights: FileRef | None = None


def named_by_digest(file: Path, folder: Path) -> FileRef:
    """Move a file of weights into the folder of payloads, and return its record. Equal weights get
    the same name, which they also have in a store.
    """
    digest, size_bytes = digest_file(file), file.stat().st_size
    name = digest.removeprefix("sha256:")
    file.replace(folder / name)
    return FileRef(
        path=f"payloads/{name}", digest=digest, size_bytes=size_bytes, media_type=MEDIA_WEIGHTS
    )


@contextmanager
def quantizing(package: str) -> Iterator[None]:
    """Make every error of the block a BuildError that names the package that quantizes."""
    try:
        yield
    except Exception as error:
        raise BuildError(
            f"{package} does not quantize this model: {type(error).__name__}: {first_line(error)};"
            " leave the recipe out for it",
            code="CP-PRECISION",
        ) from error


def with_precisions(
    report: FreezingReport,
    settings: Settings,
    products: Iterable[Product],
    exact: Sequence[str],
) -> FreezingReport:
    """Add the precision of each convolution and matrix product to the report of a recipe.

    Args:
        report: the report.
        settings: settings of the recipe; `computes` is its precision.
        products: name and precision of each product in what was built.
        exact: source nodes that a search left in floating point.

    Raises:
        BuildError: none is in the precision of the recipe; code CP-PRECISION.
    """
    wanted = settings["computes"].partition("+")[0]
    found = list(products)
    counts = Counter(precision for _, precision in found)
    if not counts[wanted]:
        runs = ", ".join(f"{num} in {name}" for name, num in counts.items()) or "it has none"
        raise BuildError(
            f"no convolution or matrix product runs in {wanted} ({runs}): the payload stayed in"
            " floating point without saying so; leave the recipe out for this model",
            code="CP-PRECISION",
        )
    reason = f"{wanted} would break the budget, or is not" if exact else f"{wanted} is not"
    kept = tuple(
        KeptTensor(name=name, reason=f"runs in {precision}: {reason} what the engine runs")
        for name, precision in found
        if precision != wanted
    )
    return replace(report, precisions=dict(counts), kept_exact=kept)


CODE, GRAPH = "code.txt", "graph.txt"
_FOLDER = re.compile(
    r"(# (?:File: )?)/(?:[^\s:]*/(?:site|dist)-packages/|[^\s:]*/)?(?=[^\s:]+:\d+)"
)
"""The folder of a source file in a comment; for an installed file, that of all packages."""


def captured_texts(program: Any) -> Texts:
    """Code and graph of an ExportedProgram or a ScriptModule, by file name."""
    exported = isinstance(program, ExportedProgram)
    try:
        texts = exported_texts(program) if exported else torchscript_texts(program)
    except Exception as error:  # a program that cannot be printed may still be frozen
        texts = {CODE: f"The captured program cannot be printed: {described(error)}\n"}
    return {f"captured-{name}": text for name, text in texts.items()}


def exported_texts(program: ExportedProgram) -> Texts:
    """Code and graph of an exported program; the graph includes its signature and the ranges of its
    sizes.
    """
    signature = str(program.graph_signature).strip()
    graph = f"{program.graph}\n\n{signature}\n"
    if program.range_constraints:
        graph += "\n# ranges\n"
    for symbol, bounds in program.range_constraints.items():
        graph += f"# {symbol}: {bounds}\n"
    code = program.graph_module.print_readable(print_output=False)
    return {CODE: shortened(code), GRAPH: shortened(graph)}


def torchscript_texts(module: Any, methods: Sequence[str] = ("forward",)) -> Texts:
    """Code of a ScriptModule and its submodules, and inlined graphs of its methods; equal code of
    several submodules is printed once, under all their names.
    """
    graphs = [f"# {method}\n{module._c._get_method(method).inlined_graph}" for method in methods]
    parts = [module._c._get_method(method).code for method in methods]
    names: dict[str, list[str]] = {}
    for name, submodule in module.named_modules():
        if name and "forward" in submodule._c._method_names():
            code = submodule._c._get_method("forward").code
            names.setdefault(code, []).append(name)
    for code, same in names.items():
        parts.append(f"# {', '.join(same)}\n{code}")
    return {CODE: "\n".join(parts), GRAPH: shortened("\n".join(graphs))}


def shortened(text: str) -> str:
    """Shorten source paths, so that the text does not depend on the machine: `# model.py:12`, `#
    torch/nn/functional.py:1491`.
    """
    return _FOLDER.sub(r"\1", text)


_OF_TORCH = frozenset(
    (
        "aten",
        "prim",
        "prims",
        "quantized",
        "_quantized",
        "sparse",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "symm_mem",
        "rngprims",
        "inductor_prims",
        "profiler",
        "prepacked",
        "xnnpack",
        "static_runtime",
        "inductor",
        "export",
        "quantization",
        "_native",
        "_dtensor",
    )
)
"""Namespaces of the operators that exist in every process that imports torch."""

_TARGET = re.compile(r"^(\w+)\.(\w+)\.\w+$")

_NO_OPERATORS = (
    "prim::Constant",
    "prim::GetAttr",
    "prim::ListConstruct",
    "prim::ListUnpack",
    "prim::DictConstruct",
    "prim::TupleConstruct",
    "prim::TupleUnpack",
    "prim::TupleIndex",
    "prim::TupleSlice",
)
"""Kinds of TorchScript's nodes that compute nothing: constants, attribute reads, packing and
unpacking.
"""


def check_operators(program: Any, lowering: PayloadKind) -> None:
    """Check that a program only calls operators that a serving process has: an artifact is opened
    without the model's code.

    Raises:
        BuildError: it calls others; code CP-CUSTOM-OPERATOR.
    """
    known = set(_OF_TORCH)
    if lowering == "inductor":
        known.add("quantized_decomposed")  # it compiles them to its own code
    missing = sorted(name for name in operators_of(program) if name.partition("::")[0] not in known)
    if missing:
        raise BuildError(
            f"{lowering}: the graph calls {', '.join(missing)}, which only the model's own code"
            " registers, so the artifact could not be served; write it in torch's operations",
            code="CP-CUSTOM-OPERATOR",
        )


def operators_of(program: Any) -> set[str]:
    """Operators called by an ExportedProgram or by any method of a ScriptModule: `aten::add`,
    `torchvision::nms`.
    """
    if isinstance(program, ExportedProgram):
        targets = map(_TARGET.match, fx_operators(program.graph_module))
        return {f"{target[1]}::{target[2]}" for target in targets if target}
    methods = map(program._c._get_method, program._c._method_names())
    return {kind for method in methods for kind in script_operators(method.inlined_graph)}


def fx_operators(module: GraphModule) -> Counter[str]:
    """Number of operators by kind in a graph of torch.fx and in its branches and loops."""
    calls: Counter[str] = Counter()
    for part in module.modules():
        if isinstance(part, GraphModule):
            calls.update(str(n.target) for n in part.graph.nodes if n.op == "call_function")
    return Counter({name: count for name, count in calls.items() if "getitem" not in name})


def script_operators(graph: Any) -> Counter[str]:
    """Number of operators by kind in an inlined graph of TorchScript and in its branches, loops and
    forked tasks.
    """
    found: Counter[str] = Counter()
    waiting = [graph]
    while waiting:
        for node in waiting.pop().nodes():
            kind = node.kind()
            if kind in _NO_OPERATORS:
                continue
            found[kind] += 1
            if kind == "prim::fork":
                task = node.g("Subgraph").copy()
                torch._C._jit_pass_inline(task)
                found += script_operators(task)
            elif kind.startswith("prim::"):  # others have no blocks, and `blocks` is slow
                waiting.extend(node.blocks())
    return found
