"""Open Inductor packages with torch; weights beside the shared library are mapped into memory, not
copied (inductor_package.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freezer.files import scratch_place
from freezer.runtime.devices import CPU
from freezer.runtime.inductor_package import (
    ALIGNMENT,
    InductorPackage,
    WeightEntry,
    borrowed,
    read_package,
)

_environment = threading.Lock()

logger = logging.getLogger("coldpress")


def open_mapped(path: Path) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """Open a package with a table of weights; None for other packages, and where torch's private
    bindings have changed.

    The file must not be modified while the runner exists; it may be removed.

    Raises:
        IntegrityError: the package is damaged.
        UsageError: no temporary folder allows code to be loaded from it.
    """
    package = read_package(path)
    if package.table is None:
        return None
    mapped = torch.from_file(
        str(path), shared=False, size=package.begin + package.table.size_bytes, dtype=torch.uint8
    )
    try:
        runner = _runner(package, mapped.data_ptr() + package.begin, package.table.constants)
    except (AttributeError, TypeError) as error:  # a torch with other private bindings
        logger.warning(
            "%s: torch %s cannot map the weights (%s); they are copied, which needs twice their"
            " size in memory at load",
            path.name,
            torch.__version__,
            error,
        )
        return None

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = runner.run(tensors)
        return outputs

    run.mapped = mapped  # type: ignore[attr-defined]  # the weights do not keep it alive
    return run


def _runner(package: InductorPackage, address: int, constants: tuple[WeightEntry, ...]) -> Any:
    """Load the shared library, which survives its temporary folder, with its weights at an
    address.
    """
    if address % ALIGNMENT:
        raise TypeError(f"not aligned to {ALIGNMENT} bytes")
    with package.shared_library() as path:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    weights = {entry.name: _tensor(address, entry) for entry in constants}
    runner.update_constant_buffer(weights, False, True, True)
    return runner


def _tensor(address: int, entry: WeightEntry) -> Tensor:
    """A tensor on memory that it does not own.

    torch never frees the handle that it makes for each such constant (`MaybeOwningAtenTensorHandle`
    of torch 2.13). If the tensor owned the mapping, every load would keep a mapping until the
    process ends.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    handle = borrowed(library, address, entry)
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
        capsule(handle, None, None)
    )
    return tensor


def open_inductor(
    path: Path,
    settings: Mapping[str, Any],
    device: torch.device = CPU,
    *,
    one_at_a_time: bool = False,
) -> Callable[..., list[Tensor]]:
    """Open a package on a device.

    torch._inductor.aoti_load_package compiles a probe for an advisory warning; the loader below it
    needs no compiler. With `one_at_a_time` the runner does not synchronize between calls, as the
    capture of CUDA graphs requires.
    """
    run_flat = open_mapped(path) if device.type == "cpu" else None
    if run_flat is None:
        index = -1 if device.index is None else device.index
        with _unpacking_to(scratch_place(executable=True)):
            run_flat = torch._C._aoti.AOTIModelPackageLoader(
                str(path), "model", one_at_a_time, 1, index
            ).run

    def run(*tensors: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = run_flat(list(tensors))
        return outputs

    return run


@contextlib.contextmanager
def _unpacking_to(place: Path) -> Iterator[None]:
    """Set the folder that torch's loader unpacks to; it uses $TMPDIR or /tmp, and keeps the files
    while the package is open.
    """
    with _environment:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(place)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
