"""Try the C++ compiler with Inductor's vector header, which every kernel includes; and find
CUDA's headers and libraries where no toolkit is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from freezer.errors import BuildError
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
        options = cpp_builder.CppTorchDeviceOptions(aot_mode=True, device_type="cpu", vec_isa=isa)
        cpp_builder.CppBuilder(
            name="trial",
            sources=str(source),
            output_dir=folder,
            BuildOption=options,
        ).build()


@contextlib.contextmanager
def cuda_toolkit(folder: Path) -> Iterator[None]:
    """Let torch find CUDA's headers and libraries during a build: an installed toolkit's, or else
    those of torch's packages and the driver that this process uses.

    Args:
        folder: where to make a temporary folder of links.

    Raises:
        BuildError: there are no headers; code CP-CUDA-HEADERS.
    """
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix=".cuda-", dir=folder) as home:
        _link_toolkit(Path(home))
        with mock.patch.object(cpp_extension, "CUDA_HOME", home):
            yield


def _link_toolkit(home: Path) -> None:
    """Link headers and libraries as in a toolkit: `include`, and `lib64` with the names that a
    linker looks for.
    """
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (nvidia and nvidia.submodule_search_locations) or ()]
    headers = [header for root in roots for header in root.glob("*/include/*")]
    libraries = [library for root in roots for library in root.glob("*/lib/lib*.so*")]
    maps = Path("/proc/self/maps").read_text().split()
    driver = {Path(word) for word in maps if Path(word).name.startswith("libcuda.so")}
    links = {home / "include" / header.name: header for header in headers}
    for library in (*libraries, *driver):
        name, _, _ = library.name.partition(".so")
        links[home / "lib64" / f"{name}.so"] = library
    if home / "include" / "cuda_runtime_api.h" not in links:
        raise BuildError(
            "no cuda_runtime_api.h to compile the host code with; install CUDA's toolkit"
            " and set CUDA_HOME, or pip install nvidia-cuda-runtime for the CUDA of this torch",
            code="CP-CUDA-HEADERS",
        )
    for link, file in links.items():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(file)
