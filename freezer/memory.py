"""Memory: the most that a block needs, and giving back that of weights which nobody needs any more."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn

_SELF = Path("/proc/self")
_SAMPLE_S = 0.05


class PeakMemory:
    """The most resident memory, in bytes, that a block takes above what the process held before it, with that of its children.

        with PeakMemory() as peak:
            ...
        peak.bytes

    The process's own peak is the kernel's (VmHWM, which is reset for it), so that nothing short is missed; compilers and other
    children are looked at 20 times a second. Resident are pages of files that the process maps too, also those that it shares.

    Attributes:
        bytes: None where the system does not tell: only Linux does.
        children_bytes: the most that the children had at one time, within `bytes` as far as it came together with the rest.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.children_bytes = 0
        self._before = 0
        self._together = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        before = _own("VmRSS")
        if before is None or not _reset_peak():
            return self
        self._before = before
        self._sampler = threading.Thread(target=self._sample, name="coldpress-memory", daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sampler is None:
            return
        self._stop.set()
        self._sampler.join()
        self.bytes = max(0, max(_own("VmHWM") or 0, self._together) - self._before)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            children = _children_bytes("self")
            if children:
                self.children_bytes = max(self.children_bytes, children)
                self._together = max(self._together, children + (_own("VmRSS") or 0))


def _own(field: str) -> int | None:
    """A figure of /proc/self/status in bytes."""
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _reset_peak() -> bool:
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _children_bytes(process: str) -> int:
    """Resident memory of all that a process started, and what that started.

    A child that has not begun a program of its own is left out: until then its memory is its parent's.
    """
    total = 0
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile, or this kernel does not tell
        return 0
    for child in children:
        try:
            if Path(f"/proc/{child}/cmdline").read_bytes() == command:
                continue
            resident = int(Path(f"/proc/{child}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        total += resident * _PAGE + _children_bytes(child)
    return total


def _page_size() -> int:
    import resource

    return resource.getpagesize()


_PAGE = _page_size()


def address_of(tensor: Tensor) -> int | None:
    """Where a tensor's memory begins; None where it has none, or is of a layout without such."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() if storage.nbytes() else None
    except (NotImplementedError, RuntimeError):
        return None


def give_back(tensors: Iterable[Tensor], in_use: Iterable[Tensor] = ()) -> int:
    """Free the memory of tensors; returns the number of bytes.

    It is freed whoever still refers to the tensors: they must never be read again. Of memory that cannot be (of a mapped file, or
    that numpy has seen) these tensors let go, and it is gone with the last other that refers to it. What is shared with a tensor
    that is in use is kept.
    """
    kept = {address_of(tensor) for tensor in in_use}
    freed: dict[int, int] = {}
    for tensor in tensors:
        address = address_of(tensor)
        if address is None or address in kept:
            continue
        storage = tensor.untyped_storage()
        freed[address] = storage.nbytes()
        if storage.resizable():
            storage.resize_(0)
        else:
            tensor.data = tensor.data.new_empty(0)
    return sum(freed.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module; of tied ones each."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [tensor for _, tensor in named]


def share(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether some memory is common to tensors and to others."""
    return not ({address_of(tensor) for tensor in ones} & {address_of(tensor) for tensor in others} <= {None})
