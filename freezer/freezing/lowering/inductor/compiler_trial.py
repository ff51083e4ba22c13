"""Try the C++ compiler with Inductor's header of vector instructions, which every kernel includes.

A precompiled header saves seconds of each build. Some compilers die of an internal error with it:
g++ 12 with 256-bit SVE.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.files import make_folder, write_whole
from freezer.freezing.environment import cleared, compiler, cpu_toolchain
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


def try_compiler(
    device_class: DeviceClass, config: Mapping[str, object], *, precompiled: bool
) -> None:
    """Compile PROGRAM like kernels: to an object with a precompiled header, or else to a library.

    Args:
        device_class: a CPU class.
        config: Inductor's configuration for the class.
        precompiled: whether to precompile the header.

    Raises:
        torch._inductor.exc.CppCompileError: the compiler fails.
        OSError: it cannot be run.
    """
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa
    from torch._inductor import config as inductor

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
        options = cpp_builder.CppTorchDeviceOptions(**command, compile_only=precompiled)
        if precompiled:
            header = codecache._precompile_header(HEADER, "coldpress", **command)
            options.precompiled_header = header
        cpp_builder.CppBuilder(
            name="trial",
            sources=str(source),
            output_dir=folder,
            BuildOption=options,
        ).build()


def header_settings(device_class: DeviceClass, config: Mapping[str, object]) -> dict[str, object]:
    """Settings of Inductor that precompile headers if the compiler takes them for a CPU class.
    Tried once per compiler, torch and class; the result is beside torch's precompiled headers.
    """
    if device_class.kind != "cpu":
        return {}
    taken = _precompiles(device_class, config)
    return {"aot_inductor.precompile_headers": taken, "cpp_cache_precompile_headers": taken}


def _precompiles(device_class: DeviceClass, config: Mapping[str, object]) -> bool:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    toolchain = cpu_toolchain()
    parts = (compiler(), toolchain["cxx"], toolchain["torch"], device_class.name)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    known = Path(default_cache_dir(), "precompiled_headers", f"coldpress-{digest}")
    if not known.exists():
        answer = b"yes"
        try:
            try_compiler(device_class, config, precompiled=True)
        except Exception:  # builds do without, for any reason
            answer = b"no"
        make_folder(known.parent)
        write_whole(known, answer, synced=False)
    return known.read_bytes() == b"yes"
