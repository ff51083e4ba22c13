"""AOTInductor with freezing: a shared library with folded constants and packed weights for one
device class.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph

from freezer.freezing.capture import Captured
from freezer.freezing.diagnostics import sentence
from freezer.freezing.environment import compiler
from freezer.freezing.lowering.exported_programs import report_before
from freezer.freezing.lowering.inductor.compiler_trial import cuda_toolkit, try_compiler
from freezer.freezing.lowering.inductor.objects import (
    reproducible,
    reused_objects,
    weights_table,
)
from freezer.freezing.lowering.inductor.precision import (
    PACKED,
    autocast_to,
    in_precision,
    products_of,
)
from freezer.freezing.lowering.inductor.torch_patches import (
    clip_windows,
    linears_of_vectors,
    linked_to_the_cpu_library,
    name_scalars,
    own_cache,
    vectors_of,
    weight_packing,
)
from freezer.freezing.lowering.isa_check import check_package, host_class
from freezer.freezing.lowering.lowered import (
    CODE,
    GRAPH,
    Lowered,
    Phases,
    Product,
    build_errors,
    check_stateless,
    shortened,
    timed,
    with_precisions,
)
from freezer.freezing.models import free_tensors
from freezer.freezing.recipes import BESIDE, RECIPES, Settings
from freezer.freezing.target import Target, packed_layouts
from freezer.hardware import DeviceClass
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.native import TABLE
from freezer.runtime.tensors import program_bytes, program_dtypes, program_tensors
from freezer.runtime.torch_settings import plain_precision
from freezer.spec import FLOAT32

SUFFIX = ".pt2"

KERNEL = "kernel of Inductor"
"""Operator kind of Inductor's own kernels."""

MAX_PRINTED = 16
"""Elements of a tensor that is not freed while Inductor works: it prints those of up to 4, also
replaced ones.
"""


@build_errors("inductor")
@torch.no_grad()
@torchscript_deprecations_silenced()
def build(captured: Captured, path: Path, target: Target, settings: Settings) -> Lowered:
    """Compile a package for the target's device class and thread count. Requires a C++ compiler.

    The program's own tensors (`captured.owned`) are freed as soon as Inductor has copied them; the
    program cannot be used afterwards.

    Raises:
        BuildError: calls change buffers; this process would pack weights for another instruction
            set than the class's; or Inductor fails.
        LeakError: the package has instructions outside the device class.
    """
    check_stateless(captured)
    size_mb = program_bytes(captured.program) / 1e6
    beside = size_mb > settings["weights_beside_above_mb"] and target.device.type == "cpu"
    packs = settings["inductor"]["freezing"] and settings["inductor"]["cpp.weight_prepack"]
    watched = Watched(captured, settings.get("computes", FLOAT32), beside=beside)
    dtypes = {*program_dtypes(captured.program), *filter(None, [PACKED.get(watched.computes)])}
    layouts = packed_layouts(target, dtypes) if packs else {}
    report, phases_s = report_before(captured), Phases()
    with own_cache(path.parent) as cache:
        with timed(phases_s, "compile"):
            files = compile_program(captured, target, settings, cache, watched)
        if watched.computes != FLOAT32:
            report = with_precisions(report, settings, watched.products, captured.exact)
        gc.collect()  # Inductor's graphs are cyclic, and hold the frozen weights
        with timed(phases_s, "package"):
            write_package(path, files, watched.table)
        with timed(phases_s, "instructions"):
            instructions = check_package(path, cache, target.device_class)
    stored = "beside the shared library" if beside else "in the shared library"
    report = replace(
        report,
        ops_after=watched.ops,
        phases_s=phases_s,
        instructions=instructions,
        instructions_of=target.device_class.name,
        notes=(f"The weights are stored {stored} ({size_mb:.1f} MB).",),
    )
    texts = {GRAPH: shortened(watched.graph), CODE: watched.code}
    return Lowered(report=report, texts=texts, layouts=layouts)


def write_package(path: Path, files: list[Any], table: str = "") -> None:
    """Write a package of compiled files, with the table of the weights beside the library, if that
    has one.
    """
    from torch.export.pt2_archive._package import package_pt2

    package_pt2(str(path), aoti_files=files, extra_files={TABLE: table} if table else None)


def compile_program(
    captured: Captured,
    target: Target,
    settings: Settings,
    cache: Path,
    watched: Watched,
) -> list[Any]:
    """Freeze and compile a program; return the files to package."""
    from torch._inductor import aot_compile, codecache, freezing  # the first import uses torch.jit

    config = configuration(settings["inductor"], target, beside=watched.beside)
    is_cpu = target.device.type == "cpu"
    module = captured.program.module(check_guards=False)
    module = in_precision(module, watched.computes, captured)
    with (
        plain_precision(target.device),
        linears_of_vectors(),
        vectors_of(host_class(target.device_class)),
        weight_packing(config["cpp.weight_prepack"] is True) if is_cpu else cuda_toolkit(cache),
        linked_to_the_cpu_library() if is_cpu else contextlib.nullcontext(),
        reused_objects(cache),
        mock.patch.object(freezing, "freeze", watched.freeze),
        mock.patch.object(codecache.AotCodeCompiler, "compile", watched.compile),
        warnings.catch_warnings(action="ignore"),  # from torch's own code while it tunes
    ):
        args, kwargs = captured.program.example_inputs
        options = known({**_changed_by_program(), **config, **_passes(watched)})
        with autocast_to(watched.computes, target.device):
            return list(
                aot_compile(
                    module,
                    args,
                    kwargs,
                    options=options,
                )
            )


def _passes(watched: Watched) -> dict[str, object]:
    """Further passes of Inductor over graphs: plain functions, because torch copies its
    configuration, with the owner of a method.
    """

    def repair(graph: Graph) -> None:
        name_scalars(graph)
        clip_windows(graph)

    return {
        "joint_custom_pre_pass": lambda graph: watched.begin(graph),
        "joint_custom_post_pass": repair,
        "post_grad_custom_post_pass": lambda graph: watched.finish(graph),
    }


class Watched:
    """Inductor's functions that freeze a program and compile its code, observed.

    Attributes:
        computes: precision of the recipe.
        beside: whether the weights are stored beside the library.
        products: name and precision of each convolution and matrix product.
        ops: number of calls by kind: Inductor's kernels, and operators of oneDNN, MKL or torch.
        code: code of the wrapper and the kernels.
        graph: text of the final graph.
        table: table of the weights, if they are stored beside the library.
    """

    def __init__(self, captured: Captured, computes: str = FLOAT32, *, beside: bool) -> None:
        from torch._inductor import codecache, freezing

        self._freeze, self._compile = freezing.freeze, codecache.AotCodeCompiler.compile
        self._owned = captured.owned
        self.beside = beside
        self.computes = computes
        self.products: list[Product] = []
        self.ops: Counter[str] = Counter()
        self.code = self.graph = self.table = ""

    def freeze(self, *args: Any) -> Any:
        """Freeze a program, and free the tensors that it owns."""
        module, inputs = self._freeze(*args)
        owned = [tensor for tensor in self._owned if tensor.numel() > MAX_PRINTED]
        free_tensors(owned, _tensors_in(module.graph))
        return module, inputs

    def begin(self, graph: Graph) -> None:
        """See a graph after its decomposition, before the first pass."""

    def finish(self, graph: Graph) -> None:
        """See a graph after the last pass."""
        module: Any = graph.owning_module
        self.graph = module.print_readable(
            print_output=False,
            include_stride=True,
        )

    def compile(self, graph: Any, wrapper: str, kernels: str, *args: Any, **kwargs: Any) -> Any:
        """Compile the code of a graph."""
        wrapper = reproducible(wrapper)
        self.ops, self.products = _calls(graph), list(products_of(graph, self.computes))
        self.code = f"{wrapper}\n\n// kernels\n\n{kernels}"
        if self.beside:
            self.table = weights_table(graph)
        return self._compile(graph, wrapper, kernels, *args, **kwargs)


def _calls(graph: Any) -> Counter[str]:
    """Number of kernels and operators that Inductor's GraphLowering calls, by kind."""
    calls: Counter[str] = Counter()
    for scheduled in graph.scheduler.nodes:
        parts = scheduled.get_nodes()
        operators = [part.node for part in parts if part.is_extern()]
        calls[KERNEL] += len(operators) < len(parts)
        for node in operators:
            kind = getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", None)
            if type(node).__name__ != "MultiOutput":
                calls[str(kind or type(node).__name__)] += 1
    return calls


def configuration(settings: Settings, target: Target, *, beside: bool) -> dict[str, object]:
    """Inductor's configuration for a build.

    Args:
        settings: see freezing/recipes.py.
        target: the device class and thread count.
        beside: whether the weights are stored beside the shared library.
    """
    config = {
        **settings,
        "aot_inductor.package": True,
        "aot_inductor.metadata": {},  # torch adds to the one it finds
        "cpp.cxx": (None, compiler()),
        **(BESIDE if beside else {}),
    }
    cpu = host_class(target.device_class)
    if cpu.kind == "cpu":
        config |= {
            "cpp.march": cpu.march,
            "cpp.simdlen": cpu.simdlen,
            "cpp.threads": target.num_threads,
        }
    if target.device_class.capability is not None:
        config["cuda.arch"] = str(target.device_class.capability)
    return config


def compiler_problem(device_class: DeviceClass) -> str | None:
    """Why the C++ compiler cannot compile kernels for a CPU class; None if it can."""
    settings = RECIPES["inductor-frozen"].settings["inductor"]
    target = Target(device_class=device_class, num_threads=1)
    config = known(configuration(settings, target, beside=False))
    try:
        try_compiler(device_class, config)
    except Exception as error:
        return sentence(error, "inductor")
    return None


def _changed_by_program() -> dict[str, object]:
    """The settings that a program has changed, with torch's defaults as values."""
    from torch._inductor import config as inductor

    values = inductor.get_config_copy()  # torch's own record keeps what builds have put back
    return {
        name: entry.default
        for name, entry in inductor._config.items()
        if entry.alias is None and values[name] != entry.default
    }


def known(config: Mapping[str, object]) -> dict[str, object]:
    """The settings that the installed torch has."""
    from torch._inductor import config as inductor

    names = inductor.get_config_copy().keys()
    return {name: value for name, value in config.items() if name in names}


def _tensors_in(graph: Graph) -> list[Tensor]:
    """The tensors that a graph reads, and those of nested graphs."""
    tensors = []
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(graph.owning_module)
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            tensors += program_tensors(value)
            attributes = [each for part in value.modules() for each in vars(part).values()]
            tensors += [each for each in attributes if isinstance(each, Tensor)]
    return tensors
