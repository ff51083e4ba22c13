"""The settings of Inductor that differ from torch's defaults, with the reasons. Imports no torch.

Every other setting has the default of the installed torch during a build, also where the
environment (TORCHINDUCTOR_..., AOT_INDUCTOR_...) or a program changed it
(freezing/target/torch_config.py). So these settings and torch's version, which are both parts of a
build's key, decide the payload. A setting that the installed torch lacks is omitted
(freezing/lowering/inductor/inductor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    # All CPUs of the device class have its vector instructions: torch need not test them, which
    # takes seconds.
    "cpp.vec_isa_ok": True,
    # For `inductor-max-autotune`; without tuning nothing is timed, so two builds of one key agree.
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_conv_backends": "ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
    "compile_threads": 1,
    # For profilers: the first costs a register, the second bytes.
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.enable_line_tables": False,
}

CUDA: Mapping[str, Any] = {
    # No weights are packed for a CPU, which only launches kernels.
    "cpp.weight_prepack": False,
    # Tuned matrix products of Triton besides torch's own; CUTLASS needs a toolkit with nvcc.
    "max_autotune_gemm_backends": "ATEN,TRITON",
    # Kernels for one kind of GPU, compiled ahead: opening the package compiles nothing.
    "aot_inductor.emit_multi_arch_kernel": False,
}
"""Settings that differ for a GPU. CUDA graphs are decided at load."""

REQUIRED = ("freezing", "cpp.weight_prepack", "cpp.march", "cpp.simdlen", "cpp.threads")
"""Settings that every supported torch has; the build refuses a torch without one of them."""

BESIDE: Mapping[str, Any] = {"aot_inductor.package_constants_on_disk_format": "binary_blob"}
"""Puts the weights beside the shared library, in a file of the package that the loader maps."""

BESIDE_ABOVE_MB = 8
"""Weights above this size, in MB of 1e6 bytes, are stored beside the library. Within it they are
unpacked and copied at each load, which takes 120 ms of CPU time for 100 MB and twice their size in
memory, but need no further file."""

REPAIRS_VERSION = 3
"""Increase when torch_patches.py changes the code of a model, so that its builds are redone: 2
clips windows of pools, 3 multiplies 1x1 convolutions over a single position as matrices by
vectors."""


def recipe_settings(
    *, freezing: bool = True, weight_prepack: bool = True, max_autotune: bool = False
) -> dict[str, Any]:
    """The settings of an Inductor recipe, all of which are part of its builds' keys.

    Args:
        freezing: make weights constants of the program, and fold what depends on them alone.
        weight_prepack: pack the weights of convolutions and linear layers for oneDNN and MKL.
        max_autotune: time the implementations of each matrix product and use the fastest.
    """
    return {
        "inductor": {
            **COMMON,
            "freezing": freezing,
            "cpp.weight_prepack": weight_prepack,
            "max_autotune": max_autotune,
        },
        "weights_beside_above_mb": BESIDE_ABOVE_MB,
        "repairs": REPAIRS_VERSION,
    }
