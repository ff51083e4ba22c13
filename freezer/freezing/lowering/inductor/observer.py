"""Looking on while Inductor freezes and compiles a model: its graphs at each stage, its constants, its kernels and its code.

    unfrozen   after the passes that hold for all models, convolution weights laid out anew; freezing begins
    merged     common subexpressions merged; constants are to be folded
    frozen     freezing is done
    final      after all passes; this is lowered to kernels

Where torch has a hook (custom passes of its configuration) it is used; elsewhere a function of torch is wrapped while it builds.
What cannot be seen, since torch is another than this was written for, is noted in `missing`, and the build goes on.
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
from freezer.runtime.tensor_memory import address_of

STAGES = ("unfrozen", "merged", "frozen", "final")

_KERNEL = re.compile(r'^extern "C"\s+void\s+(\w+)\(', re.MULTILINE)
_CALL = re.compile(r"^\s+(\w+)\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """A node of a graph as it was.

    Attributes:
        op, kind: of the node; its operator or its attribute's name.
        root: name of the node of the captured program that it came from; empty where torch does not tell.
        inputs: names of the nodes that it takes.
        constant: whether it is a weight, or depends on weights alone.
        variable: whether it depends on an input of the model. What only makes a tensor, of a size or a range, is neither.
        channels_last: whether it is a copy in the channels-last layout.
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
        """Whether it is an operator; taking a result apart is none, nor is what Python computes of sizes."""
        return self.op == "call_function" and "." in self.kind and not self.kind.startswith("aten.sym_")


Graph = Mapping[str, GraphNode]
"""Nodes by name, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A tensor in the frozen graph: its size, whether it is packed, and where its memory begins."""

    size_bytes: int
    packed: bool
    address: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Extern:
    """A call of an operator that is no kernel of Inductor's own, with the names of what is fused into it."""

    kind: str
    fused: tuple[str, ...]


@dataclass
class Watch:
    """What was seen of one build.

    Attributes:
        stages: the graphs, by name of the stage.
        sources: for each node that freezing computed, the nodes that it was computed from.
        constants: of the frozen graph, by name of the node.
        outputs: names of the nodes that the final graph gives.
        externs: calls of operators.
        num_loops: of Inductor's own, before they were fused.
        kernels: names of its own kernels, one for each call.
        code: of the wrapper and of the kernels.
        graph: the final graph in text.
        missing: what could not be seen, and why.
    """

    stages: dict[str, Graph] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
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
    """What is seen of the build that runs in this block, and the hooks that its configuration must hold.

    Args:
        before: called with each graph after the passes that hold for all models, before freezing; it may change it.
        frozen: called with the frozen graph; not with those of its branches (torch.cond), of which Inductor makes the passes first.
        lowered: called with Inductor's GraphLowering, when the code is written and before it is compiled.
    """
    watch = Watch()
    whole: list[weakref.ref[torch.fx.GraphModule]] = []

    def see(what: str, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            watch.missing.append(f"{what} ({type(error).__name__}: {first_line(error)})")

    def at_joint(graph: torch.fx.Graph) -> None:
        before(graph)

    def at_frozen(graph: torch.fx.Graph) -> None:
        see("the frozen graph", lambda: _frozen(watch, graph))
        if any(graph.owning_module is module() for module in whole):
            frozen(graph)

    def at_final(graph: torch.fx.Graph) -> None:
        see("the final graph", lambda: _final(watch, graph))

    def at_compile(graph: Any, *code: str) -> None:
        see("the kernels", lambda: _kernels(watch, graph, *code))
        lowered(graph)

    hooks = {  # plain functions: torch copies its configuration, and would copy what a method belongs to
        "joint_custom_post_pass": at_joint,
        "post_grad_custom_pre_pass": at_frozen,
        "post_grad_custom_post_pass": at_final,
    }
    with _wrapped(watch, see, whole), _compiling(at_compile, watch):
        yield watch, hooks


@contextlib.contextmanager
def _wrapped(
    watch: Watch, see: Callable[[str, Callable[[], None]], None], whole: list[weakref.ref[torch.fx.GraphModule]]
) -> Iterator[None]:
    """Look at the graph where freezing begins, whose module goes into `whole`, and before each folding of constants."""
    from torch._inductor import freezing

    def at_freeze(*args: Any) -> None:
        see("the graph that freezing begins with", lambda: watch.stages.update(unfrozen=_nodes(_module_among(args).graph)))
        see("the module that is frozen", lambda: whole.append(weakref.ref(_module_among(args))))

    def at_fold(*args: Any) -> None:
        see("the folding of constants", lambda: _fold(watch, _module_among(args).graph))

    with contextlib.ExitStack() as stack:
        for name, look in (("freeze", at_freeze), ("constant_fold", at_fold)):
            if hasattr(freezing, name):
                stack.enter_context(_looking(freezing, name, look))
            else:
                watch.missing.append(f"torch._inductor.freezing.{name}, which torch {torch.__version__} does not have")
        yield


@contextlib.contextmanager
def _compiling(look: Callable[..., None], watch: Watch) -> Iterator[None]:
    from torch._inductor import codecache

    if not hasattr(codecache, "AotCodeCompiler"):
        watch.missing.append(f"torch._inductor.codecache.AotCodeCompiler, which torch {torch.__version__} does not have")
        yield
        return

    def with_code(*args: Any) -> None:
        look(args[0], *(code for code in args[1:3] if isinstance(code, str)))

    with _looking(codecache.AotCodeCompiler, "compile", with_code):
        yield


@contextlib.contextmanager
def _looking(owner: Any, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with the positional arguments of each call of a function, or class method, before it."""
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
    """What a function of torch works on: its last GraphModule."""
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
    """The operator as torch names it; of a fusion the function of Inductor's that lowers it."""
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
    watch.outputs = tuple(node.name for node in graph.output_node().all_input_nodes)
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
