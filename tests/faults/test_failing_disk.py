"""The durable writes of freezer and pipeline, on a disk that fails one step in three: see failing_disk.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.sites import failing_disk
from tests.raylets import ROOT

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PLAIN = """
import os, sys
from collections import Counter
from pathlib import Path

folder, failing = Path(sys.argv[1]), Path(sys.argv[2])
failing.unlink()
file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
failing.touch()
steps = {
    "write": lambda: os.pwrite(file, b"12345678", 0),
    "truncate": lambda: os.ftruncate(file, 8),
    "sync": lambda: os.fsync(file),
    "link": lambda: os.link(folder / "file", folder / "link"),
    "rename": lambda: os.replace(folder / "link", folder / "renamed"),
    "unlink": lambda: os.unlink(folder / "renamed"),
    "mkdir": lambda: os.mkdir(folder / "folder"),
    "rmdir": lambda: os.rmdir(folder / "folder"),
}
failed, short = Counter(), 0
for _ in range(300):
    for name, step in steps.items():
        while True:
            try:
                written = step()
                short += name == "write" and written < 8
                break
            except OSError:
                failed[name] += 1
assert failed.keys() == steps.keys(), failed
for name, count in failed.items():
    assert 0.23 < count / (300 + count) < 0.43, failed
assert short > 10, short
"""

DURABLE = """
import os, sys
from pathlib import Path
from freezer.files import atomic
from freezer.files.atomic import copy_whole, link_or_copy, link_whole, make_folder, move, remove, sync, write_whole
from pipeline.workspace.staging import move_whole, remove_tree

atomic.WAITS_S = tuple(0.0 for _ in range(25))
folder = Path(sys.argv[1])
data = os.urandom(40 * atomic.CHUNK_BYTES + 1)
write_whole(folder / "long", data)
copy_whole(folder / "long", folder / "copy", mode=0o444)
for number in range(40):
    work = folder / "a" / str(number) / "b"
    make_folder(work)
    write_whole(work / "one", data[:number])
    link_whole(work / "one", work / "two")
    link_or_copy(work / "one", work / "c" / "three")
    sync(work / "one")
    move(work / "two", work / "four")
    move_whole(work / "c", folder / "kept" / str(number))
    remove(work / "one")
    assert (folder / "kept" / str(number) / "three").read_bytes() == (work / "four").read_bytes() == data[:number]
assert (folder / "long").read_bytes() == (folder / "copy").read_bytes() == data
remove_tree(folder / "a")
remove_tree(folder / "kept")
"""


@pytest.mark.parametrize(("script", "left"), [(PLAIN, ["file"]), (DURABLE, ["copy", "long"])], ids=["plain", "durable"])
def test_only_durable_writes_survive_a_failing_disk(script: str, left: list[str], tmp_path: Path) -> None:
    """Plain writes fail a third of the time, and some are short; durable ones succeed and leave nothing behind."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "failing").touch()
    environ = {**os.environ, **failing_disk(tmp_path, disk), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(disk), str(tmp_path / "failing")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in disk.iterdir()) == left
