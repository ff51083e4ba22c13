"""Many faulty items in one worker, one after the other: each has its typed failure, and nothing is left behind.

`python -m tests.pipeline.worker.test_sandbox_many FOLDER ROUNDS` is that worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from freezer.store.store import WORK
from pipeline.worker import sandbox
from pipeline.worker.child import End
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.supervisor import Bounds
from pipeline.workspace.staging import staging_folder
from tests.pipeline import faults
from tests.pipeline.worker.test_sandbox import add, gone, raise_plain

Fault = tuple[Callable[..., Any], tuple[Any, ...], str]
"""A function, its arguments, and the kind of its failure; "" if it does not fail."""

QUICK: tuple[Fault, ...] = (
    (add, (1, 2), ""),
    (raise_plain, (), "error"),
    (faults.segfault, (), "crash"),
    (faults.kill_itself, (), "crash"),
    (faults.become_another_program, (), "crash"),
    (faults.close_everything, (), "crash"),
    (faults.close_its_output, (), "error"),
    (faults.open_everything, (), "error"),
    (faults.return_twice, (), ""),
    (faults.raise_without_words, (), "error"),
    (faults.load_damage, ("{damaged}",), "error"),
    (faults.detach, ("{pids}", "return"), ""),
    (faults.detach, ("{pids}", "crash"), "crash"),
    (faults.kill_its_parent, ("{pids}",), "crash"),
    (faults.remove_its_folder, ("{folder}",), ""),
    (faults.fill_its_temporary_folder, (1_000_000, "{places}"), "crash"),
    (faults.ask_for_input, (), "error"),
    (faults.eat_at_once, (12 * 10**9,), "memory"),
)
SLOW: tuple[Fault, ...] = (
    (faults.spin, (), "timeout"),
    (faults.stop_itself, (), "timeout"),
    (faults.detach, ("{pids}", "hang"), "timeout"),
    (faults.hang_in_a_compiler, ("{compiler}",), "timeout"),
    (faults.eat, (), "memory"),
    (faults.talk, (), "output"),
    (faults.lock_its_folder, (), "error"),
    (faults.fork_for_ever, (), "processes"),
)


def one(fault: Fault, store: Path, places: dict[str, str]) -> End:
    """Run one item in its own staging folder."""
    function, arguments, expected = fault
    Path(places["pids"]).unlink(missing_ok=True)
    with staging_folder(str(store)) as folder:
        args = tuple(word.format(**places, folder=folder) if isinstance(word, str) else word for word in arguments)
        return run_isolated(
            function,
            args,
            folder=folder,
            log=store / "log",
            bounds=Bounds(timeout_s=1.0 if expected == "timeout" else 60.0, memory_bytes=1_200_000_000),
        )


def main(folder: Path, rounds: int) -> None:
    """Run QUICK some times, and SLOW once if that is more than one time; print wrong results and what is left."""
    sandbox.PRELOAD = ["torch", "pipeline.worker.supervisor"]
    compiler = folder / "slow-g++"
    compiler.write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000 &\nsleep 1000\n")
    compiler.chmod(0o755)
    (folder / "damaged.pt").write_bytes(b"PK\x03\x04" + bytes(1000))
    places = {name: str(folder / name) for name in ("pids", "places")}
    places |= {"compiler": str(compiler), "damaged": str(folder / "damaged.pt")}
    one(QUICK[0], folder, places)  # starts the forkserver of the worker
    here, wrong = psutil.Process(), []
    below, handles = {child.pid for child in here.children(recursive=True)}, here.num_fds()
    for fault in (*QUICK * rounds, *(SLOW if rounds > 1 else ())):
        end = one(fault, folder, places)
        if (end.failure.kind if end.failure else "") != fault[2]:
            wrong.append(f"{fault[0].__name__}: {end}")
        if fault[0] in (faults.detach, faults.kill_its_parent):
            lines = Path(places["pids"]).read_text().split()
            wrong += [f"{fault[0].__name__}: {pid} lives" for pid in lines if not gone(int(pid))]
    left = [child.name() for child in here.children(recursive=True) if child.pid not in below]
    print(json.dumps({"wrong": wrong, "children": left, "handles": here.num_fds() - handles}))


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_faulty_items_leave_nothing(tmp_path: Path, rounds: int) -> None:
    temporary = tmp_path / "system"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "tests.pipeline.worker.test_sandbox_many", str(tmp_path), str(rounds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert (found["children"], found["handles"]) == ([], 0), "no child, no zombie, no handle"
    assert list(temporary.iterdir()) == [], "no temporary file"
    assert list((tmp_path / WORK / "staging").iterdir()) == []
    environs = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
    assert not any(environ.get("TMPDIR") == str(temporary) for environ in environs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
