"""AOTInductor with freezing: a shared library with folded constants and packed weights for one device class."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freezer.errors import BuildError, UsageError
from freezer.freezing.capture.program import Captured
from freezer.freezing.diagnostics.messages import inductor_sentence
from freezer.freezing.lowering.inductor.cuda_toolkit import cuda_toolkit
from freezer.freezing.lowering.inductor.inductor_report import graph_text, program_of, report_of
from freezer.freezing.lowering.inductor.observer import Watch, watching
from freezer.freezing.lowering.inductor.torch_patches import (
    clip_windows,
    linears_of_vectors,
    name_scalars,
    own_cache,
    vectors_of,
    weight_packing,
)
from freezer.freezing.lowering.inductor.weight_table import table_of, write_table
from freezer.freezing.lowering.isa_check import check_package, host_class
from freezer.freezing.lowering.readable import CODE, GRAPH, shortened
from freezer.freezing.lowering.result import Lowered, timed
from freezer.freezing.models.weights import give_back
from freezer.freezing.recipes.inductor_settings import BESIDE, REQUIRED
from freezer.freezing.target.target import Target, packed_layouts
from freezer.freezing.target.toolchain import compiler
from freezer.freezing.target.torch_config import straying
from freezer.runtime.inductor_loader import TABLE
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.precision import plain_precision
from freezer.runtime.tensors import program_bytes, program_dtypes

SUFFIX = ".pt2"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Compile a package for the target's device class and thread count. Requires a C++ compiler.

    The program's own tensors (`captured.owned`) are freed as soon as Inductor has copied them; the program cannot be used
    afterwards.

    Raises:
        BuildError: calls change buffers, whose first values freezing would bake in; this process would pack weights for another
            instruction set than the class's; or Inductor fails.
        LeakError: the package has instructions outside the device class.
    """
    if captured.mutates and settings["inductor"]["freezing"]:
        raise BuildError(
            f"inductor: a call changes {', '.join(captured.mutates)}, and freezing would bake the first values in; "
            "torchscript-frozen keeps state",
            code="CP-STATE",
        )
    if not captured.program.graph_signature.user_inputs:
        raise BuildError("inductor: the model takes no tensor, which Inductor cannot compile; use torchscript-frozen")
    try:
        return _Build(captured, path, target, settings).run()
    except BuildError:
        raise
    except UsageError as error:
        raise BuildError(f"inductor: {error}", code=error.code) from error
    except Exception as error:
        raise BuildError(f"inductor: {inductor_sentence(error)}") from error


class _Build:
    """One build: the program, its settings, and what to report."""

    def __init__(self, captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> None:
        self._captured, self._path, self._target = captured, path, target
        self._program = captured.program
        self._facts = program_of(self._program, prefix="model." if captured.convention == "flat" else "")
        limit_mb = settings["weights_beside_above_mb"]
        self._size_mb = program_bytes(self._program) / 1e6
        self._on_gpu = target.device.type == "cuda"
        self._beside = self._size_mb > limit_mb and not self._on_gpu
        self._why = f"{self._size_mb:.1f} MB, {'above' if self._beside else 'not above'} {limit_mb} MB"
        self._settings = settings["inductor"]
        self._table: str | None = None
        self._phases_s: dict[str, float] = {}
        packs = self._settings["freezing"] and self._settings["cpp.weight_prepack"]
        self._layouts = packed_layouts(target, program_dtypes(self._program)) if packs else {}

    def run(self) -> Lowered:
        """Compile, package and report."""
        with own_cache(self._path.parent) as cache:
            watch, files = self._compile()
            gc.collect()  # Inductor's graphs are cyclic, and hold the frozen weights
            with timed(self._phases_s, "package"):
                self._package(files)
            with timed(self._phases_s, "instructions"):
                instructions = check_package(self._path, cache, self._target.device_class)
        report = replace(
            report_of(watch, self._facts, self._phases_s, [self._where()]),
            instructions=instructions,
            instructions_of=self._target.device_class.name,
        )
        texts = {GRAPH: shortened(graph_text(watch, self._facts)), CODE: watch.code}
        return Lowered(report=report, texts={name: text for name, text in texts.items() if text}, layouts=self._layouts)

    def _compile(self) -> tuple[Watch, list[Any]]:
        started, compiled = time.monotonic(), [time.monotonic()]

        def frozen(graph: torch.fx.Graph) -> None:
            give_back(self._captured.owned, _tensors_in(graph))

        def repaired(graph: torch.fx.Graph) -> None:
            name_scalars(graph)
            clip_windows(graph)

        def lowered(graph: Any) -> None:
            compiled[0] = time.monotonic()
            if self._beside:
                self._table = write_table(*table_of(graph))

        with (
            torch.no_grad(),
            torchscript_deprecations_silenced(),
            plain_precision(self._target.device),
            linears_of_vectors(),
            vectors_of(host_class(self._target.device_class)),
            cuda_toolkit(self._path.parent) if self._on_gpu else contextlib.nullcontext(),
            watching(before=repaired, frozen=frozen, lowered=lowered) as (watch, hooks),
        ):
            from torch._inductor import aot_compile  # its first import uses torch.jit

            args, kwargs = self._program.example_inputs
            given = configuration(self._settings, self._target, beside=self._beside)
            config = known({**straying("torch._inductor.config"), **given, **hooks})
            packing = contextlib.nullcontext() if self._on_gpu else weight_packing(self._settings["cpp.weight_prepack"])
            with packing, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from torch's own code while it tunes
                files = aot_compile(self._program.module(check_guards=False), args, kwargs, options=config)
        self._phases_s |= {"lower": compiled[0] - started, "compile": time.monotonic() - compiled[0]}
        return watch, list(files)

    def _package(self, files: list[Any]) -> None:
        from torch.export.pt2_archive._package import package_pt2

        package_pt2(str(self._path), aoti_files=files, extra_files={TABLE: self._table} if self._table else None)

    def _where(self) -> str:
        if self._on_gpu:
            return f"The weights are stored in the shared library, and copied to the GPU at load ({self._size_mb:.1f} MB)."
        if not self._beside:
            return f"The weights are stored in the shared library ({self._why})."
        return f"The weights are stored beside the shared library, and mapped into memory at load ({self._why})."


def configuration(settings: Mapping[str, Any], target: Target, *, beside: bool) -> dict[str, Any]:
    """Inductor's configuration for a build.

    Args:
        settings: see freezing/recipes/inductor_settings.py.
        target: the device class and thread count.
        beside: whether the weights are stored beside the shared library.
    """
    config = {**settings, "aot_inductor.package": True, "cpp.cxx": (None, compiler()), **(BESIDE if beside else {})}
    cpu = host_class(target.device_class)
    if cpu.kind == "cpu":
        config |= {"cpp.march": cpu.march, "cpp.simdlen": cpu.simdlen, "cpp.threads": target.num_threads}
    if target.device_class.capability is not None:
        config["cuda.arch"] = str(target.device_class.capability)
    return config


def known(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the installed torch has.

    Raises:
        BuildError: torch lacks a required setting, or the environment forces another value.
    """
    from torch._inductor import config as inductor

    names = inductor.get_config_copy().keys()
    lacking = [name for name in REQUIRED if name in config and name not in names]
    if lacking:
        raise BuildError(
            f"inductor: torch {torch.__version__} has no setting {', '.join(lacking)}; use another torch, from 2.11 on"
        )
    found = {name: value for name, value in config.items() if name in names}
    with inductor.patch(found):
        effective = inductor.get_config_copy()
    for name, value in found.items():  # some environment variables override the program
        if effective[name] != value:
            raise BuildError(
                f"inductor: the environment forces {name} to be {effective[name]!r}, but the recipe sets {value!r}; unset "
                f"TORCHINDUCTOR_{name.upper().replace('.', '_')}"
            )
    return found


def _tensors_in(graph: torch.fx.Graph) -> list[Tensor]:
    """The tensors that a graph reads, and those of nested graphs."""
    found: list[Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        value: Any = graph.owning_module
        for part in node.target.split("."):
            value = getattr(value, part)
        if isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers()]
            found += [item for part in value.modules() for item in vars(part).values() if isinstance(item, Tensor)]
        elif isinstance(value, Tensor):
            found.append(value)
    return found
