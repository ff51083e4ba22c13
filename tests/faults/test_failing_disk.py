"""What writes, and removes, on a disk that really fails one step in three: see failing_disk.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.sites import ROOT, failing_disk

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PLAIN = """
import itertools, json, os, sys
from collections import Counter
from pathlib import Path

names = (f"{sys.argv[1]}/link-{number}" for number in itertools.count())  # to rename one link of a file to another does nothing
folder, failing = Path(sys.argv[1]), Path(sys.argv[2])
path = folder / "path"
failing.unlink()
handle, other = os.open(folder / "file", os.O_RDWR), os.open(folder / "from", os.O_RDONLY)
failing.touch()
steps = {
    "write": lambda: os.write(handle, b"12345678"),
    "pwrite": lambda: os.pwrite(handle, b"12345678", 0),
    "writev": lambda: os.writev(handle, [b"1234", b"5678"]),
    "sendfile": lambda: os.sendfile(handle, other, 0, 8),
    "cut": lambda: os.ftruncate(handle, 8),
    "sync": lambda: os.fsync(handle),
    "make and remove": lambda: (os.mkdir(path), os.rmdir(path)),
    "open and unlink": lambda: (path.touch(), path.unlink()),
    "link and rename": lambda: (os.link(folder / "file", link := next(names)), os.replace(link, link + "-renamed")),
}
found = {name: Counter() for name in steps}
for name, step in steps.items():
    for _ in range(400):
        try:
            done = step()
            found[name]["short" if isinstance(done, int) and done < 8 else "well"] += 1
        except OSError as error:
            found[name][os.strerror(error.errno)] += 1
            failing.unlink()
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            failing.touch()
print(json.dumps(found))
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


def on_a_failing_disk(folder: Path, script: str) -> str:
    environ = {**os.environ, **failing_disk(folder, folder / "disk"), "PYTHONPATH": str(ROOT)}
    (folder / "disk").mkdir()
    for name in ("file", "from"):
        (folder / "disk" / name).write_bytes(b"12345678")
    (folder / "failing").touch()
    command = [sys.executable, "-c", script, str(folder / "disk"), str(folder / "failing")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_third_of_all_steps_fails_and_some_writes_are_short(tmp_path: Path) -> None:
    found: dict[str, dict[str, int]] = json.loads(on_a_failing_disk(tmp_path, PLAIN))
    for name, counts in found.items():
        num_steps = 2 if " and " in name else 1
        failed = counts.get("Input/output error", 0) / sum(counts.values())
        assert failed == pytest.approx(1 - (2 / 3) ** num_steps, abs=0.12), (name, counts)
    assert {name for name, counts in found.items() if counts.get("short")} == {"write", "pwrite", "writev", "sendfile"}


def test_what_writes_durably_comes_to_its_end_and_leaves_nothing_aside(tmp_path: Path) -> None:
    on_a_failing_disk(tmp_path, DURABLE)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["copy", "file", "from", "long"]
