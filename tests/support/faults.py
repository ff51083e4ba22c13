"""Functions that fail in different ways, for children under test.

They leave their processes and files behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

MOST_FORKS = 300
"""Number of processes at which a fork bomb stops by itself."""


def segfault() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def save_beyond_a_full_disk() -> None:
    """Save to a full device, whose error comes when the file is closed."""
    import torch

    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 3)), "/dev/full")


def kill_itself() -> None:
    """SIGKILL, as from the kernel's OOM killer."""
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGKILL)


def become_another_program() -> None:
    """Replace the process by another program."""
    os.execvp("true", ["true"])


def spin() -> None:
    """Loop forever and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def stop_itself() -> None:
    """Stop by SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


def eat() -> None:
    """Allocate forever, 20 MB at a time."""
    kept = []
    while True:
        kept.append(b"x" * 20_000_000)


def eat_at_once(num_bytes: int) -> None:
    """Allocate memory at once, and write to every page."""
    kept = bytearray(num_bytes)
    for index in range(0, num_bytes, mmap.PAGESIZE):
        kept[index] = 1


def eat_in_children() -> None:
    """Start four processes that allocate forever."""
    for _ in range(4):
        if os.fork() == 0:
            eat()
    time.sleep(1000)


_BOMB = f"""
import mmap, os, time
count = mmap.mmap(-1, 8)
while int.from_bytes(count[:8], "little") < {MOST_FORKS}:
    count[:8] = (int.from_bytes(count[:8], "little") + 1).to_bytes(8, "little")
    os.fork()
time.sleep(1000)
"""


def fork_for_ever() -> None:
    """Start a fork bomb in a small process: forks of one with torch are slow."""
    os.execv(sys.executable, [sys.executable, "-S", "-c", _BOMB])


def talk(num_bytes: int = 1_000_000_000) -> None:
    """Print as fast as possible."""
    line = b"x" * 999 + b"\n"
    for _ in range(num_bytes // 1_000_000):
        os.write(1, line * 1000)


def open_everything() -> None:
    """Open files until no handle is left."""
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def detach(pids: str, then: str) -> None:
    """Start processes that leave the session and ignore signals; then return, hang or crash."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                with open(pids, "a") as file:
                    file.write(f"{os.getpid()}\n")
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
    wait_for_lines(Path(pids), 2)
    if then == "hang":
        time.sleep(1000)
    if then == "crash":
        segfault()


def fill_its_temporary_folder(num_bytes: int, places: str) -> None:
    """Write to all folders for temporary files, list them in `places`, and exit without a
    result.
    """
    names = (
        "TMPDIR",
        "TEMP",
        "TMP",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
    )
    found = [tempfile.gettempdir(), *(os.environ[name] for name in names)]
    Path(places).write_text("\n".join(found))
    for place in found:
        Path(place).mkdir(parents=True, exist_ok=True)
        with open(f"{place}/flood", "ab") as file:
            for _ in range(num_bytes // 1_000_000):
                file.write(bytes(1_000_000))
    os._exit(3)


def recurse() -> None:
    """Recurse beyond C's stack."""
    sys.setrecursionlimit(10**9)

    def deeper(depth: int) -> int:
        return sorted([depth], key=deeper)[0] + deeper(depth + 1)

    deeper(0)


class _SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_without_words() -> None:
    """Raise an exception that cannot be printed."""
    raise _SpeechlessError


def ask_for_input() -> None:
    """Read from a terminal that does not exist."""
    input("proceed? ")


def limits() -> tuple[int, int, int]:
    """Return the limits of core files and private memory, and the OOM score."""
    score = int(Path("/proc/self/oom_score_adj").read_text())
    return (
        resource.getrlimit(resource.RLIMIT_CORE)[0],
        resource.getrlimit(resource.RLIMIT_DATA)[0],
        score,
    )


def wait_for_lines(path: Path, num_lines: int, timeout_s: float = 10) -> list[str]:
    """Wait for lines of a file that another process writes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = path.read_text().split() if path.exists() else []
        if len(lines) >= num_lines:
            return lines
        time.sleep(0.01)
    raise TimeoutError(f"{path} has no {num_lines} lines")
