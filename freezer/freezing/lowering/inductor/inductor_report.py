"""What Inductor's freezing did to a captured program: a Report, from the graphs that were seen (observer.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freezer.artifact.freezing_report import Change, FreezingReport
from freezer.freezing.lowering.exported import fx_operators
from freezer.freezing.lowering.inductor.observer import STAGES, Graph, GraphNode, Watch
from freezer.runtime.tensor_memory import address_of, identity_of, program_tensors, tensors_bytes

KERNEL = "kernel of Inductor"
"""The kind that Inductor's own kernels are counted under, beside the operators that it calls."""

DROPOUT, MERGED = "dropouts removed", "common subexpressions merged"
COMPUTED = "operators computed into constants"
BATCH_NORM = "batch norms folded into convolutions"
SUMS, PRODUCTS = "additions and subtractions folded into convolutions", "multiplications and divisions folded into convolutions"
VIEWS = "views made reshapes"
CHANNELS_LAST, PACKED = "convolution weights laid out channels last", "weights packed"
PRETRANSPOSED = "linear layers pretransposed"
CONCATENATED = "linear layers over one input concatenated"
ACTIVATIONS = "activations fused into convolutions and linear layers"
ADDITIONS = "additions and multiplications fused into convolutions and linear layers"
FUSED = "loops fused into kernels"
COPIED = "outputs that are constants, copied at each call"

_DROPOUTS = ("aten.dropout.", "aten.feature_dropout.", "aten.alpha_dropout.", "aten.feature_alpha_dropout.", "aten.native_dropout.")
_BATCH_NORMS = ("aten.batch_norm.", "aten._native_batch_norm_legit", "aten.native_batch_norm.", "aten.cudnn_batch_norm.")
_SUMS, _PRODUCTS = ("aten.add.", "aten.sub."), ("aten.mul.", "aten.div.")
_CONVOLUTIONS = ("aten.convolution.",)
_LINEARS = ("aten.addmm.", "aten.mm.")
_TRANSPOSES = ("aten.permute.", "aten.t.", "aten.transpose.")
_BINARY = ("add", "sub", "mul", "add_relu")
MAX_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the report needs of a captured program; taken before it is compiled, which may free its tensors.

    Attributes:
        ops: number of operators by kind.
        roots: the kind of each operator, by name of its node.
        names: of parameters and buffers as the source model calls them, by the name that the graph reads them under; of those that
            the graph reads.
        num, size_bytes: of those, tied ones counted once.
        unused: names of the others.
        addresses: of the memory of all its tensors.
    """

    ops: Mapping[str, int]
    roots: Mapping[str, str]
    names: Mapping[str, str]
    num: int
    size_bytes: int
    unused: tuple[str, ...]
    addresses: frozenset[int | None]


def program_of(program: torch.export.ExportedProgram, *, prefix: str) -> Program:
    """What the report needs of an exported program.

    Args:
        program: of torch.export.
        prefix: of names in the program that the source model has without it.
    """
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    read = {targets[node.name] for node in program.graph.nodes if node.name in targets and node.users}
    tensors = {name: tensor for name in targets.values() if (tensor := _tensor(program, name)) is not None}
    memory = {identity_of(tensors[name]) for name in read if name in tensors}
    used = {name: tensor for name, tensor in tensors.items() if identity_of(tensor) in memory}  # tied ones are read by one name
    return Program(
        ops=dict(fx_operators(program.graph_module)),
        roots={node.name: str(node.target) for node in program.graph.nodes if node.op == "call_function"},
        names={name: name.removeprefix(prefix) for name in used},
        num=len(memory),
        size_bytes=tensors_bytes(used.values()),
        unused=tuple(name.removeprefix(prefix) for name in tensors if name not in used),
        addresses=frozenset(address_of(tensor) for tensor in program_tensors(program)),
    )


def _tensor(program: torch.export.ExportedProgram, name: str) -> Tensor | None:
    found: Any = program.state_dict.get(name, program.constants.get(name))
    return found if isinstance(found, Tensor) else None


def report_of(watch: Watch, program: Program, phases_s: Mapping[str, float], notes: Iterable[str]) -> FreezingReport:
    """What was done; without sizes of files, which the build adds. What was not seen is left out, and a note says so."""
    missing = [*watch.missing, *(f"the graph `{name}`" for name in STAGES if name not in watch.stages)]
    told = (f"What was done cannot be told in full; not seen were: {'; '.join(missing)}.",) if missing else ()
    return FreezingReport(
        ops_before=program.ops,
        ops_after=_ops_after(watch),
        changes=tuple(change for change in _changes(watch, program) if change.count > 0),
        num_constants=program.num,
        constants_bytes=program.size_bytes,
        constants=tuple(program.names.values()),
        folded_bytes=_folded_bytes(watch, program),
        unused=program.unused,
        phases_s=phases_s,
        notes=(*notes, *told),
    )


def _ops_after(watch: Watch) -> dict[str, int]:
    ops = Counter(extern.kind for extern in watch.externs)
    return {**ops, **({KERNEL: len(watch.kernels)} if watch.kernels else {})}


def _changes(watch: Watch, program: Program) -> Iterator[Change]:
    stages = watch.stages
    if "unfrozen" in stages:
        yield Change(name=DROPOUT, count=_num_dropped(stages["unfrozen"], program))
    if {"unfrozen", "merged", "frozen"} <= stages.keys():
        yield from _freezing(watch, program)
    activations = [text for extern in watch.externs for text in extern.fused if text not in _BINARY]
    binaries = [text for extern in watch.externs for text in extern.fused if text in _BINARY]
    yield Change(name=ACTIVATIONS, count=len(activations), note=_counted(activations))
    yield Change(name=ADDITIONS, count=len(binaries), note=_counted(binaries))
    if watch.num_loops > len(watch.kernels) > 0:
        yield Change(name=FUSED, count=watch.num_loops, note=f"in {len(watch.kernels)} calls of kernels")
    copied = [name for name in watch.outputs if _is_constant(watch, name)]
    yield Change(name=COPIED, count=len(copied))


def _freezing(watch: Watch, program: Program) -> Iterator[Change]:
    """What freezing itself did, from the graphs before and after."""
    unfrozen, merged, frozen = (watch.stages[name] for name in ("unfrozen", "merged", "frozen"))
    norms = _batch_norms(merged, program)
    gone = {name for name, node in merged.items() if node.calls and not node.constant and name not in frozen}
    folded = [name for name in gone if name not in norms and _of_convolution(merged, name, gone)]
    yield Change(name=MERGED, count=sum(node.calls and node.variable and name not in merged for name, node in unfrozen.items()))
    yield Change(name=BATCH_NORM, count=len({root for root in norms.values() if not _survives(root, norms, frozen)}))
    yield Change(name=SUMS, count=_count(merged, folded, _SUMS))
    yield Change(name=PRODUCTS, count=_count(merged, folded, _PRODUCTS))
    yield Change(name=COMPUTED, count=sum(_of_the_model(name, merged, program) for name in merged))
    yield Change(
        name=VIEWS,
        count=sum(_is(unfrozen[n].kind, "aten.view.") and _is(frozen[n].kind, "aten.reshape.") for n in unfrozen if n in frozen),
    )
    yield Change(name=CHANNELS_LAST, count=sum(node.constant and node.channels_last for node in unfrozen.values()))
    yield Change(name=PRETRANSPOSED, count=sum(_is_pretransposed(node, merged) for node in merged.values()))
    sizes = [constant.size_bytes for constant in watch.constants.values() if constant.packed]
    yield Change(name=PACKED, count=len(sizes), note=f"{sum(sizes)} bytes" if sizes else "")


def _num_dropped(graph: Graph, program: Program) -> int:
    left = {node.root for node in graph.values()}
    return sum(_is(kind, *_DROPOUTS) and name not in left for name, kind in program.roots.items())


def _batch_norms(graph: Graph, program: Program) -> dict[str, str]:
    """The nodes of batch norms that inputs go through, each with the name of its batch norm in the captured program."""
    return {
        name: node.root
        for name, node in graph.items()
        if node.calls and not node.constant and _is(program.roots.get(node.root, ""), *_BATCH_NORMS)
    }


def _survives(root: str, norms: Mapping[str, str], frozen: Graph) -> bool:
    return any(name in frozen for name, of in norms.items() if of == root)


def _of_convolution(graph: Graph, name: str, gone: set[str]) -> bool:
    """Whether a node that is gone took the result of a convolution, through others that are gone."""
    if not _is(graph[name].kind, *_SUMS, *_PRODUCTS):
        return False
    for item in graph[name].inputs:
        if _is(graph[item].kind, *_CONVOLUTIONS) or (item in gone and _of_convolution(graph, item, gone)):
            return True
    return False


def _of_the_model(name: str, graph: Graph, program: Program) -> bool:
    """Whether a node is an operator of the model itself on constants alone: none of a layer's own arithmetic on its weights."""
    node = graph[name]
    kind = program.roots.get(node.root, "")
    layer = _is(kind, *_BATCH_NORMS, "aten.linear.", "aten.conv", "aten.lstm.", "aten.gru.", "aten.rnn")
    return node.calls and node.constant and node.kind.startswith("aten.") and kind != "" and not layer


def _is_pretransposed(node: GraphNode, graph: Graph) -> bool:
    """Whether a node is a linear layer whose weight is transposed when it is frozen."""
    weights = [graph[item] for item in node.inputs if graph[item].constant and graph[item].calls]
    return _is(node.kind, *_LINEARS) and any(_is(weight.kind, *_TRANSPOSES) for weight in weights)


def _is_constant(watch: Watch, name: str) -> bool:
    final = watch.stages.get("final", {})
    node = final.get(name)
    while node is not None and "inductor_force_stride_order" in node.kind and node.inputs:
        node = final.get(node.inputs[0])
    return node is not None and node.op == "get_attr"


def _folded_bytes(watch: Watch, program: Program) -> int:
    """Bytes of the frozen graph's constants that are no memory of the captured program's, and not packed."""
    new = {
        constant.address: constant.size_bytes
        for constant in watch.constants.values()
        if not constant.packed and constant.address is not None and constant.address not in program.addresses
    }
    return sum(new.values())


def _count(graph: Graph, names: Iterable[str], kinds: tuple[str, ...]) -> int:
    return sum(_is(graph[name].kind, *kinds) for name in names)


def _is(kind: str, *beginnings: str) -> bool:
    return kind.startswith(beginnings)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))


def graph_text(watch: Watch, program: Program) -> str:
    """The final graph, and for each constant in it the parameters and buffers that it was computed from."""
    lines = []
    for name, node in watch.stages.get("final", {}).items():
        if node.op == "get_attr":
            origins = sorted({program.names[target] for target in _origins(watch, name) if target in program.names})
            more = f" and {len(origins) - MAX_NAMES} more" if len(origins) > MAX_NAMES else ""
            lines.append(f"# {node.kind} ({name}): of {', '.join(origins[:MAX_NAMES]) or 'no parameter'}{more}")
    return watch.graph + "\n\n# constants\n" + "\n".join(lines) + "\n" if watch.graph else ""


def _origins(watch: Watch, name: str) -> set[str]:
    """Names of the attributes of the captured program that a constant was computed from."""
    unfrozen = watch.stages.get("unfrozen", {})
    found, todo, seen = set(), [name], {name}
    while todo:
        item = todo.pop()
        if item in unfrozen and unfrozen[item].op == "get_attr":
            found.add(unfrozen[item].kind)
        fresh = [source for source in watch.sources.get(item, ()) if source not in seen]
        seen.update(fresh)
        todo += fresh
    return found
