"""Open Inductor packages with torch; weights beside the shared library are mapped into memory, not
copied (native/payload.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from freezer.files import scratch_folder
from freezer.runtime.contract import Runner
from freezer.runtime.devices import CPU
from freezer.runtime.native import read_package, weight_capsule

_environment = threading.Lock()

logger = logging.getLogger("coldpress")


def open_inductor(
    path: Path,
    settings: Mapping[str, object],
    device: torch.device = CPU,
) -> Runner:
    """Open a package on a device.

    torch._inductor.aoti_load_package compiles a probe for an advisory warning; the loader below it
    needs no compiler. The file must not be modified while the runner exists; it may be removed.

    Args:
        path: file of the package.
        settings: settings of the recipe; not used.
        device: device to run on.

    Raises:
        IntegrityError: the package is damaged.
        UsageError: no temporary folder allows code to be loaded from it.
    """
    run_flat = _open_mapped(path) if device.type == "cpu" else None
    with contextlib.ExitStack() as stack:
        if run_flat is None:
            index = -1 if device.index is None else device.index
            folder = stack.enter_context(scratch_folder(executable=True))
            with _unpacking_to(folder):
                run_flat = torch._C._aoti.AOTIModelPackageLoader(
                    str(path), "model", False, 1, index
                ).run

        def run(*tensors: Tensor) -> list[Tensor]:
            return run_flat(list(tensors))

        weakref.finalize(run, stack.pop_all().close)
    return run


def _open_mapped(path: Path) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """Open a package with a table of weights; None for other packages, and where torch's private
    bindings have changed.
    """
    package = read_package(path)
    if package.table is None:
        return None
    try:
        mapping, address = package.mapped_weights(package.table)
        with package.shared_library() as library:  # it survives its temporary folder
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        weights: dict[str, Tensor] = {}
        for entry in package.table.constants:
            # A tensor that does not own its memory: torch never frees the handle that it makes for
            # each such constant (`MaybeOwningAtenTensorHandle` of torch 2.13). If the tensor owned
            # the mapping, every load would keep a mapping until the process ends.
            weights[entry.name] = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(
                weight_capsule(address, entry)
            )
        runner.update_constant_buffer(weights, False, True, True)
    except (AttributeError, TypeError) as error:  # a torch with other private bindings
        logger.warning(
            "%s: torch %s cannot map the weights (%s); they are copied, which needs twice their"
            " size in memory at load",
            *(path.name, torch.__version__, error),
        )
        return None

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = runner.run(tensors)
        return outputs

    run.mapping = mapping  # type: ignore[attr-defined]  # the weights do not keep it alive
    return run


@contextlib.contextmanager
def one_warning(name: str) -> Iterator[None]:
    """Log what the process prints on stderr as one line: a torch newer than that of a package
    prints a line for each function that it does not find there.

    Do not use it for other packages: it delays what other threads print, and loses a crash's trace.
    """
    try:
        before = os.dup(2)
    except OSError:  # a service without stderr
        yield
        return
    with tempfile.TemporaryFile("w+", errors="replace") as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            caught.seek(0)
            # its advice may be ignored: such functions are newer than the package, and not called
            text = re.sub(r"\. This is okay.*", "", caught.read()).strip().replace("\n", "; ")
            if text:
                logger.warning("%s, opened by torch %s: %s", name, torch.__version__, text)


@contextlib.contextmanager
def _unpacking_to(folder: Path) -> Iterator[None]:
    """Set the folder that torch's loader unpacks to; it uses $TMPDIR or /tmp, keeps the files while
    the package is open, and leaves them if it does not open.
    """
    with _environment:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(folder)
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before
