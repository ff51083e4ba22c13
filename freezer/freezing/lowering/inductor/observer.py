"""Observe Inductor while it freezes and compiles a model: graphs at each stage, constants, kernels and code.

    unfrozen   after the passes for all models, with convolution weights in their new layout; freezing begins
    merged     common subexpressions are merged; constants are not folded yet
    frozen     freezing is done
    final      after all passes; this graph is lowered to kernels

Uses the custom passes of torch's configuration, and wraps torch functions where it has none. An observation that fails, because
another torch differs, is recorded in `missing`, and the build continues.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from freezer.errors import first_line
from freezer.runtime.tensors import address_of

_KERNEL = re.compile(r'^extern "C"\s+void\s+(\w+)\(', re.MULTILINE)
_CALL = re.compile(r"^\s+(\w+)\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """A node of a graph at one stage.

    Attributes:
        op: the node's `op`.
        kind: its operator, or its attribute's name.
        root: name of the node of the captured program it came from; empty if unknown.
        inputs: names of its input nodes.
        constant: whether it is a weight or depends on weights only.
        variable: whether it depends on an input of the model. Nodes that only create a tensor are neither.
        channels_last: whether it copies to the channels-last layout.
    """

    op: str
    kind: str
    root: str
    inputs: tuple[str, ...]
    constant: bool
    variable: bool
    channels_last: bool

    @property
    def calls(self) -> bool:
        """Whether it is an operator; `getitem` and Python arithmetic on sizes are not."""
        return self.op == "call_function" and "." in self.kind and not self.kind.startswith("aten.sym_")


Graph = Mapping[str, GraphNode]
"""Nodes by name, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A tensor in the frozen graph: its size, whether it is packed, and its address."""

    size_bytes: int
    packed: bool
    address: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Extern:
    """A call of an operator that is not one of Inductor's own kernels, with the names of operations fused into it."""

    kind: str
    fused: tuple[str, ...]


@dataclass
class Watch:
    """Observations of one build.

    Attributes:
        stages: graphs by name of the stage.
        sources: for each node computed by freezing, the nodes it was computed from.
        constants: constants of the frozen graph, by name of the node.
        externs: calls of operators.
        num_loops: Inductor's loops before fusion.
        kernels: names of Inductor's kernels, one for each call.
        code: code of the wrapper and the kernels.
        graph: text of the final graph.
        missing: observations that failed, with the reason.
    """

    stages: dict[str, Graph] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    externs: list[Extern] = field(default_factory=list)
    num_loops: int = 0
    kernels: tuple[str, ...] = ()
    code: str = ""
    graph: str = ""
    missing: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watching(
    *, before: Callable[[torch.fx.Graph], None], frozen: Callable[[torch.fx.Graph], None], lowered: Callable[[Any], None]
) -> Iterator[tuple[Watch, dict[str, Any]]]:
    """Observe the build that runs in this block; yield the observations and the hooks to set in its configuration.

    Args:
        before: called with each graph after the passes for all models, before freezing; may change the graph.
        frozen: called with the frozen graph, but not with graphs of its branches (torch.cond), which Inductor handles first.
        lowered: called with Inductor's GraphLowering after the code is written and before it is compiled.
    """
    watch = Watch()
    whole: list[weakref.ref[torch.fx.GraphModule]] = []

    def see(what: str, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            watch.missing.append(f"{what} ({type(error).__name__}: {first_line(error)})")

    # Plain functions, because torch copies its configuration, with the owner of a method.
    def at_joint(graph: torch.fx.Graph) -> None:
        before(graph)

    def at_frozen(graph: torch.fx.Graph) -> None:
        see("the frozen graph", lambda: _frozen(watch, graph))
        if any(graph.owning_module is module() for module in whole):
            frozen(graph)

    def at_final(graph: torch.fx.Graph) -> None:
        see("the final graph", lambda: _final(watch, graph))

    def at_freeze(*args: Any) -> None:
        module = _module_among(args)
        whole.append(weakref.ref(module))
        see("the unfrozen graph", lambda: watch.stages.update(unfrozen=_nodes(module.graph)))

    def at_fold(*args: Any) -> None:
        see("the folding of constants", lambda: _fold(watch, _module_among(args).graph))

    def at_compile(graph: Any, *code: Any) -> None:
        see("the kernels", lambda: _kernels(watch, graph, *(text for text in code[:2] if isinstance(text, str))))
        lowered(graph)

    from torch._inductor import codecache, freezing

    with (
        _looking(freezing, "freeze", at_freeze),
        _looking(freezing, "constant_fold", at_fold),
        _looking(codecache.AotCodeCompiler, "compile", at_compile),
    ):
        hooks = {
            "joint_custom_post_pass": at_joint,
            "post_grad_custom_pre_pass": at_frozen,
            "post_grad_custom_post_pass": at_final,
        }
        yield watch, hooks


@contextlib.contextmanager
def _looking(owner: Any, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with the positional arguments of a function or class method before each call."""
    original, kept = getattr(owner, name), vars(owner)[name]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        look(*args)
        return original(*args, **kwargs)

    setattr(owner, name, staticmethod(wrapper) if isinstance(owner, type) else wrapper)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _module_among(args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """The last GraphModule among the arguments."""
    return next(item for item in reversed(args) if isinstance(item, torch.fx.GraphModule))


def _nodes(graph: torch.fx.Graph) -> Graph:
    nodes: dict[str, GraphNode] = {}
    for node in graph.nodes:
        inputs = tuple(item.name for item in node.all_input_nodes)
        constant = node.op == "get_attr" or (node.op == "call_function" and all(nodes[item].constant for item in inputs))
        nodes[node.name] = GraphNode(
            op=node.op,
            kind=_kind(node.target),
            root=_root(node),
            inputs=inputs,
            constant=constant and bool(inputs or node.op == "get_attr"),
            variable=node.op == "placeholder" or any(nodes[item].variable for item in inputs),
            channels_last=node.kwargs.get("memory_format") is torch.channels_last,
        )
    return nodes


def _kind(target: Any) -> str:
    """Torch's name of the operator; for a fusion the name of Inductor's function that lowers it."""
    while hasattr(target, "func") and not hasattr(target, "_schema"):
        target = target.func
    return str(target) if hasattr(target, "_schema") or isinstance(target, str) else getattr(target, "__qualname__", str(target))


def _root(node: torch.fx.Node) -> str:
    source = node.meta.get("from_node") or [None]
    found = source[-1]
    while getattr(found, "from_node", None):
        found = found.from_node[-1]
    return getattr(found, "name", "") or ""


def _fold(watch: Watch, graph: torch.fx.Graph) -> None:
    nodes = _nodes(graph)
    watch.stages.setdefault("merged", nodes)
    watch.sources |= {name: node.inputs for name, node in nodes.items() if node.constant and node.inputs}


def _frozen(watch: Watch, graph: torch.fx.Graph) -> None:
    watch.stages["frozen"] = _nodes(graph)
    watch.constants = {}
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(graph.owning_module)
        if isinstance(value, Tensor):
            packed = bool(value.is_mkldnn)
            size = torch.ops.mkldnn._nbytes(value) if packed else value.numel() * value.element_size()
            watch.constants[node.name] = Constant(size_bytes=size, packed=packed, address=None if packed else address_of(value))


def _final(watch: Watch, graph: torch.fx.Graph) -> None:
    watch.stages["final"] = _nodes(graph)
    module: Any = graph.owning_module
    watch.graph = module.print_readable(print_output=False, include_stride=True)


def _kernels(watch: Watch, graph: Any, wrapper: str, kernels: str = "") -> None:
    watch.code = wrapper + (f"\n\n// kernels\n\n{kernels}" if kernels else "")
    names = set(_KERNEL.findall(kernels))
    watch.kernels = tuple(name for name in _CALL.findall(wrapper) if name in names)
    for scheduled in graph.scheduler.nodes:
        for part in scheduled.get_nodes():
            if not part.is_extern():
                watch.num_loops += 1
            elif type(part.node).__name__ != "MultiOutput":
                watch.externs.append(_extern(part.node))


def _extern(node: Any) -> Extern:
    name = getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", None) or type(node).__name__
    texts = [item for item in getattr(node, "constant_args", ()) if isinstance(item, str)]
    return Extern(kind=str(name), fused=tuple(text for text in texts if text not in ("none", "")))
