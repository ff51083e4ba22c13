"""Functions that go wrong, each in its own way, for children under test. All that they start is theirs to leave behind."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MOST_FORKS = 300
"""Where a fork bomb stops by itself, should nobody stop it."""


def segfault() -> None:
    """Reads address 0."""
    ctypes.string_at(0)


def abort() -> None:
    """As C++ does for an exception that nobody catches."""
    os.abort()


def save_beyond_the_disk() -> None:
    """As on a full disk: torch.jit.save ends the process."""
    import torch

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with tempfile.TemporaryDirectory() as folder:
        torch.jit.save(torch.jit.script(torch.nn.Linear(200, 200)), f"{folder}/large.pt")


def save_beyond_a_full_disk() -> None:
    """As above, of a file that is written when it is closed."""
    import torch

    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 3)), "/dev/full")


def crash_with_words_of_the_disk() -> None:
    """Of a file that it did without."""
    print("could not write the cache: No space left on device", flush=True)
    os.abort()


def kill_itself() -> None:
    """SIGKILL, as from the kernel's OOM killer."""
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    """os._exit, without a result."""
    os._exit(7)


def become_another_program() -> None:
    """exec of a program that knows nothing of results."""
    os.execvp("true", ["true"])


def spin() -> None:
    """A loop without end that ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def stop_itself() -> None:
    """SIGSTOP: it never goes on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def compile_for_ever() -> None:
    """g++, and the compiler proper that it starts, which read a source that does not end."""
    source, _ = os.pipe()
    subprocess.run(["g++", "-x", "c++", "-c", "-o", "never.o", "-"], stdin=source, check=True)


def hang_in_a_compiler(compiler: str) -> None:
    """Waits for a compiler that never ends."""
    subprocess.run([compiler, "-O2", "x.cpp"], check=True)


def eat() -> None:
    """Allocates for ever, 20 MB at a time."""
    kept = []
    while True:
        kept.append(b"x" * 20_000_000)


def eat_at_once(num_bytes: int) -> None:
    """Allocates much at once, and writes to all of it."""
    kept = bytearray(num_bytes)
    for index in range(0, num_bytes, mmap.PAGESIZE):
        kept[index] = 1


def eat_in_children() -> None:
    """Has four processes that allocate for ever."""
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
    """A fork bomb: each copy forks on. Of a small process, since copies of one with torch in it take their time to be made."""
    os.execv(sys.executable, [sys.executable, "-S", "-c", _BOMB])


def return_twice() -> int:
    """Both sides of a fork come back."""
    return os.fork()


def talk(num_bytes: int = 1_000_000_000) -> None:
    """Prints 1 GB as fast as it can."""
    line = b"x" * 999 + b"\n"
    for _ in range(num_bytes // 1_000_000):
        os.write(1, line * 1000)


def close_its_output() -> None:
    """Closes stdout and stderr, and prints."""
    os.close(1)
    os.close(2)
    print("nobody reads this", flush=True)


def close_everything() -> str:
    """Closes all handles that it knows nothing of, as daemons do."""
    os.closerange(3, 4096)
    return "the result cannot be told"


def open_everything() -> None:
    """Opens files until no handle is left."""
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def detach(pids: str, then: str) -> None:
    """Starts processes that leave its session and its tree, and ignore signals; and returns, hangs, or crashes."""
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


def kill_its_parent(pids: str) -> None:
    """Kills the process that watches it, with a detached one still there."""
    detach(pids, "return")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def remove_its_folder(folder: str) -> int:
    """Removes where it was told to work."""
    shutil.rmtree(folder)
    return 1


def lock_its_folder() -> None:
    """Makes a temporary folder that nobody may enter, and one that is nested deeper than Python's recursion."""
    locked = Path(tempfile.mkdtemp()) / "locked"
    (locked / "within").mkdir(parents=True)
    locked.chmod(0)
    os.chdir(tempfile.mkdtemp())
    for _ in range(1500):
        Path("d").mkdir()
        os.chdir("d")
    raise ValueError("left in a mess")


def fill_its_temporary_folder(num_bytes: int, places: str) -> None:
    """Writes much to temporary files, in all the places where programs look for one, tells them, and leaves without a word."""
    names = ("TMPDIR", "TEMP", "TMP", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
    found = [tempfile.gettempdir(), *(os.environ[name] for name in names)]
    Path(places).write_text("\n".join(found))
    for place in found:
        Path(place).mkdir(parents=True, exist_ok=True)
        with open(f"{place}/flood", "ab") as file:
            for _ in range(num_bytes // 1_000_000):
                file.write(bytes(1_000_000))
    os._exit(3)


def fill_the_disk() -> None:
    """Writes temporary files for ever: at once most of what a small disk has, then 5 MB a second."""
    disk = os.statvfs(tempfile.gettempdir())
    num_bytes = min(500_000_000, disk.f_bavail * disk.f_frsize * 19 // 20)
    while True:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(bytes(num_bytes))
        num_bytes = 50_000
        time.sleep(0.01)


def return_a_lambda() -> Callable[[], None]:
    """A result that does not pickle."""
    return lambda: None


class _Refuses:
    """An object that pickles, and is not to be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> NoReturn:
    raise RuntimeError("not here")


def return_what_cannot_be_read() -> object:
    """A result that pickles, and raises when it is read."""
    return _Refuses()


def return_much() -> bytes:
    """A result of 100 MB."""
    return bytes(100_000_000)


def recurse() -> None:
    """Recursion without end, beyond C's stack."""
    sys.setrecursionlimit(10**9)

    def deeper(depth: int) -> int:
        return sorted([depth], key=deeper)[0] + deeper(depth + 1)

    deeper(0)


class _SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_without_words() -> None:
    """An exception that cannot be printed."""
    raise _SpeechlessError


def load_damage(path: str) -> None:
    """Opens a model file whose bytes were damaged."""
    import torch

    torch.jit.load(path)


def ask_for_input() -> None:
    """Reads from a terminal that is not there."""
    input("proceed? ")


def limits() -> tuple[int, int, int]:
    """What a child is under: core files, memory that it may ask for, and how soon the kernel takes it."""
    score = int(Path("/proc/self/oom_score_adj").read_text())
    return resource.getrlimit(resource.RLIMIT_CORE)[0], resource.getrlimit(resource.RLIMIT_DATA)[0], score


def wait_for_lines(path: Path, num_lines: int, timeout_s: float = 10) -> list[str]:
    """The lines of a file that somebody else writes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = path.read_text().split() if path.exists() else []
        if len(lines) >= num_lines:
            return lines
        time.sleep(0.01)
    raise TimeoutError(f"{path} has no {num_lines} lines")
