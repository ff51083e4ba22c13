"""AOTInductor with freezing: a shared library with constants folded and weights packed for one device class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freezer.capture import Captured
from freezer.device_class import DeviceClass
from freezer.errors import BuildError
from freezer.legacy import torchscript_deprecations_silenced
from freezer.report import Lowered
from freezer.target import Target

SUFFIX = ".pt2"


def build(captured: Captured, path: Path, target: Target, settings: Mapping[str, Any]) -> Lowered:
    """Compile a package for the target's device class and thread count. Needs a C++ compiler.

    Raises:
        BuildError: the model mutates buffers (freezing would bake their first values in), or Inductor fails.
    """
    if captured.mutates and settings["freezing"]:
        raise BuildError(
            f"inductor: a call changes {', '.join(captured.mutates)}, and freezing would bake the first values in; "
            "torchscript-frozen keeps state",
            code="CP-STATE",
        )
    if not captured.program.graph_signature.user_inputs:
        raise BuildError("inductor: the model takes no tensor, and Inductor compiles none without; torchscript-frozen does")
    config: dict[str, Any] = {
        "freezing": settings["freezing"],
        "cpp.weight_prepack": settings["weight_prepack"],
        "max_autotune": settings["max_autotune"],
        "compile_threads": 1,
    }
    device_class = target.device_class
    if device_class.kind == "cpu":
        config |= {"cpp.march": device_class.march, "cpp.simdlen": device_class.simdlen, "cpp.threads": target.num_threads}
    try:
        with torch.no_grad(), torchscript_deprecations_silenced(), _vectors_of(device_class):
            from torch._inductor import aoti_compile_and_package  # here: its first import uses torch.jit

            aoti_compile_and_package(captured.program, package_path=str(path), inductor_configs=config)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise BuildError(f"inductor: {type(error).__name__}: {lines[0]}") from error
    return Lowered()


def open_payload(path: Path, settings: Mapping[str, Any]) -> Callable[..., list[Tensor]]:
    """A runner of the package.

    torch._inductor.aoti_load_package compiles a probe to fill an advisory warning; the loader under it needs no compiler.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)

    def run(*tensors: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = loader.run(list(tensors))
        return outputs

    return run


@contextlib.contextmanager
def _vectors_of(device_class: DeviceClass) -> Iterator[None]:
    """Let Inductor see the vector instructions of the class, not those of the CPU it builds on.

    `cpp.march` alone is not enough: for 512-bit vectors Inductor adds -mavx512vnni, -mavx512bf16 and -mamx-* when the CPU has
    them, whatever the target.
    """
    if device_class.kind != "cpu":
        yield
        return
    from torch._inductor import cpu_vec_isa

    class PlainAVX512(cpu_vec_isa.VecAVX512):  # type: ignore[misc]
        """AVX-512 as x86-64-v4 defines it."""

        __hash__ = cpu_vec_isa.VecISA.__hash__

        def build_arch_flags(self) -> str:
            return str(self._arch_flags)

    isa = PlainAVX512() if device_class.simdlen == 512 else cpu_vec_isa.VecAVX2()
    whole = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = lambda: [isa]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = whole
