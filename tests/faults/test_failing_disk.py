"""The durable writes of freezer and pipeline, on a disk that fails one step in three: see
failing_disk.c.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.fault_sites import failing_disk
from tests.support.raylets import ROOT

DURABLE = """
import os, sys
from pathlib import Path
from freezer.files import atomic
from freezer.files.atomic import (
    copy_whole, link_or_copy, link_whole, make_folder, move, remove, sync, write_whole
)
from pipeline.workspace import machine_time
from pipeline.workspace.machine_time import move_whole, remove_tree

machine_time.WAITS_S = atomic.WAITS_S = tuple(0.0 for _ in range(25))
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
    kept = folder / "kept" / str(number) / "three"
    assert kept.read_bytes() == (work / "four").read_bytes() == data[:number]
assert (folder / "long").read_bytes() == (folder / "copy").read_bytes() == data
remove_tree(folder / "a")
remove_tree(folder / "kept")
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_only_durable_writes_survive_a_failing_disk(tmp_path: Path) -> None:
    """Plain writes fail; durable ones succeed and leave nothing unfinished behind."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "failing").touch()
    environ = {**os.environ, **failing_disk(tmp_path, disk), "PYTHONPATH": str(ROOT)}
    plain = """
import pathlib, sys
for _ in range(100):
    pathlib.Path(sys.argv[1]).write_bytes(b"12345678")
"""
    refused = finished(sys.executable, "-c", plain, disk / "plain", env=environ)
    assert "Input/output error" in refused.stderr
    done = finished(sys.executable, "-c", DURABLE, disk, env=environ)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in disk.iterdir()} - {"plain"} == {"copy", "long"}
