"""Try the C++ compiler with Inductor's vector header, which every kernel includes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.freezing.environment import cleared
from freezer.freezing.lowering.inductor.torch_patches import vectors_of
from freezer.hardware import DeviceClass

HEADER = "torch/csrc/inductor/cpp_prefix.h"

PROGRAM = f"""
#include <{HEADER}>
extern "C" void coldpress_trial(const float* in, float* out, long size) {{
    using Vector = at::vec::Vectorized<float>;
    const long step = Vector::size();
#pragma omp parallel for
    for (long i = 0; i < size; i += step) {{
        auto x = Vector::loadu(in + i);
        (x.exp() + x.tanh() * at::vec::maximum(x, Vector(0.0f))).store(out + i);
    }}
}}
"""
"""Code like that of Inductor's kernels, with OpenMP."""


def try_compiler(device_class: DeviceClass, config: Mapping[str, object]) -> None:
    """Compile PROGRAM like kernels, to a library.

    Args:
        device_class: a CPU class.
        config: Inductor's configuration for the class.

    Raises:
        torch._inductor.exc.CppCompileError: the compiler fails.
        OSError: it cannot be run.
    """
    from torch._inductor import config as inductor
    from torch._inductor import cpp_builder, cpu_vec_isa

    with (
        tempfile.TemporaryDirectory() as folder,
        cleared(),
        vectors_of(device_class),
        inductor.patch(dict(config)),
    ):
        source = Path(folder, "trial.cpp")
        source.write_text(PROGRAM)
        isa = cpu_vec_isa.pick_vec_isa()
        command: dict[str, Any] = {"aot_mode": True, "device_type": "cpu", "vec_isa": isa}
        options = cpp_builder.CppTorchDeviceOptions(**command)
        cpp_builder.CppBuilder(
            name="trial",
            sources=str(source),
            output_dir=folder,
            BuildOption=options,
        ).build()
