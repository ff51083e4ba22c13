"""Report what Inductor's freezing did to a captured program, from the observed graphs (observer.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freezer.artifact.sections import Change, FreezingReport
from freezer.freezing.lowering.exported import fx_operators
from freezer.freezing.lowering.inductor.observer import Graph, Watch
from freezer.runtime.tensors import address_of, identity_of, program_tensors, tensors_bytes

KERNEL = "kernel of Inductor"
"""Operator kind of Inductor's own kernels."""

DROPOUT, MERGED = "dropouts removed", "common subexpressions merged"
COMPUTED = "operators computed into constants"
BATCH_NORM = "batch norms folded into convolutions"
SUMS, PRODUCTS = "additions and subtractions folded into convolutions", "multiplications and divisions folded into convolutions"
CHANNELS_LAST, PACKED = "convolution weights laid out channels last", "weights packed"
ACTIVATIONS = "activations fused into convolutions and linear layers"
ADDITIONS = "additions and multiplications fused into convolutions and linear layers"
FUSED = "loops fused into kernels"

_DROPOUTS = ("aten.dropout.", "aten.feature_dropout.", "aten.alpha_dropout.", "aten.feature_alpha_dropout.", "aten.native_dropout.")
_BATCH_NORMS = ("aten.batch_norm.", "aten._native_batch_norm_legit", "aten.native_batch_norm.", "aten.cudnn_batch_norm.")
_SUMS, _PRODUCTS = ("aten.add.", "aten.sub."), ("aten.mul.", "aten.div.")
_CONVOLUTIONS = ("aten.convolution.",)
_BINARY = ("add", "sub", "mul", "add_relu")
MAX_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts about a captured program, recorded before it is compiled, which may free its tensors.

    Attributes:
        ops: number of operators by kind.
        roots: kind of each operator, by name of its node.
        names: names in the source model of the parameters and buffers that the graph reads, by their names in the graph.
        num, size_bytes: number and size of those, tied ones counted once.
        unused: names of the other parameters and buffers.
        addresses: memory addresses of all tensors.
    """

    ops: Mapping[str, int]
    roots: Mapping[str, str]
    names: Mapping[str, str]
    num: int
    size_bytes: int
    unused: tuple[str, ...]
    addresses: frozenset[int | None]


def program_of(program: torch.export.ExportedProgram, *, prefix: str) -> Program:
    """Record the facts that the report needs.

    Args:
        program: the exported program.
        prefix: prefix of names in the program, which the source model's names lack.
    """
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    read = {targets[node.name] for node in program.graph.nodes if node.name in targets and node.users}
    tensors = {name: tensor for name in targets.values() if (tensor := _tensor(program, name)) is not None}
    memory = {identity_of(tensors[name]) for name in read if name in tensors}
    used = {name: tensor for name, tensor in tensors.items() if identity_of(tensor) in memory}  # includes tied ones
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
    """Report what was done; the build adds file sizes. If an observation failed, a note names it, and no changes are counted."""
    missing = (f"The changes could not be counted; failed to observe {'; '.join(watch.missing)}.",) if watch.missing else ()
    return FreezingReport(
        ops_before=program.ops,
        ops_after=_ops_after(watch),
        changes=() if missing else tuple(change for change in _changes(watch, program) if change.count > 0),
        num_constants=program.num,
        constants_bytes=program.size_bytes,
        constants=tuple(program.names.values()),
        folded_bytes=_folded_bytes(watch, program),
        unused=program.unused,
        phases_s=phases_s,
        notes=(*notes, *missing),
    )


def _ops_after(watch: Watch) -> dict[str, int]:
    ops = Counter(extern.kind for extern in watch.externs)
    return {**ops, **({KERNEL: len(watch.kernels)} if watch.kernels else {})}


def _changes(watch: Watch, program: Program) -> Iterator[Change]:
    yield Change(name=DROPOUT, count=_num_dropped(watch.stages["unfrozen"], program))
    yield from _freezing(watch, program)
    fused = [text for extern in watch.externs for text in extern.fused]
    activations, binaries = [text for text in fused if text not in _BINARY], [text for text in fused if text in _BINARY]
    yield Change(name=ACTIVATIONS, count=len(activations), note=_counted(activations))
    yield Change(name=ADDITIONS, count=len(binaries), note=_counted(binaries))
    if watch.num_loops > len(watch.kernels) > 0:
        yield Change(name=FUSED, count=watch.num_loops, note=f"in {len(watch.kernels)} calls of kernels")


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
    yield Change(name=CHANNELS_LAST, count=sum(node.constant and node.channels_last for node in unfrozen.values()))
    sizes = [constant.size_bytes for constant in watch.constants.values() if constant.packed]
    yield Change(name=PACKED, count=len(sizes), note=f"{sum(sizes)} bytes" if sizes else "")


def _num_dropped(graph: Graph, program: Program) -> int:
    left = {node.root for node in graph.values()}
    return sum(_is(kind, *_DROPOUTS) and name not in left for name, kind in program.roots.items())


def _batch_norms(graph: Graph, program: Program) -> dict[str, str]:
    """Nodes of batch norms of variable tensors, with the name of their batch norm in the captured program."""
    return {
        name: node.root
        for name, node in graph.items()
        if node.calls and not node.constant and _is(program.roots.get(node.root, ""), *_BATCH_NORMS)
    }


def _survives(root: str, norms: Mapping[str, str], frozen: Graph) -> bool:
    return any(name in frozen for name, of in norms.items() if of == root)


def _of_convolution(graph: Graph, name: str, gone: set[str]) -> bool:
    """Whether a removed node took the result of a convolution, directly or through other removed nodes."""
    if not _is(graph[name].kind, *_SUMS, *_PRODUCTS):
        return False
    for item in graph[name].inputs:
        if _is(graph[item].kind, *_CONVOLUTIONS) or (item in gone and _of_convolution(graph, item, gone)):
            return True
    return False


def _of_the_model(name: str, graph: Graph, program: Program) -> bool:
    """Whether a node is the model's own operator on constants, not a layer's arithmetic on its weights."""
    node = graph[name]
    kind = program.roots.get(node.root, "")
    layer = _is(kind, *_BATCH_NORMS, "aten.linear.", "aten.conv", "aten.lstm.", "aten.gru.", "aten.rnn")
    return node.calls and node.constant and node.kind.startswith("aten.") and kind != "" and not layer


def _folded_bytes(watch: Watch, program: Program) -> int:
    """Size of the frozen graph's new constants, without packed ones."""
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
    """The final graph, and the parameters and buffers that each of its constants was computed from."""
    lines = []
    for name, node in watch.stages.get("final", {}).items():
        if node.op == "get_attr":
            origins = sorted({program.names[target] for target in _origins(watch, name) if target in program.names})
            more = f" and {len(origins) - MAX_NAMES} more" if len(origins) > MAX_NAMES else ""
            lines.append(f"# {node.kind} ({name}): of {', '.join(origins[:MAX_NAMES]) or 'no parameter'}{more}")
    return watch.graph + "\n\n# constants\n" + "\n".join(lines) + "\n" if watch.graph else ""


def _origins(watch: Watch, name: str) -> set[str]:
    """Names of the captured program's attributes that a constant was computed from."""
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
