"""Temporary folders on file systems that are read-only or do not allow execution."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from freezer.errors import UsageError
from freezer.files import scratch_folder, scratch_place
from freezer.runtime.loaders import open_inductor
from freezer.runtime.native.payload import TABLE
from tests.conftest import Frozen
from tests.support.commands import Done, finished
from tests.support.steps import HERE, random_inputs

MOUNT = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'
"""For a shell in its own mount namespace: mount a file system with options $0 at $1, and run a
command.
"""

SERVE = """
import sys, freezer
folder, threads = sys.argv[1], int(sys.argv[2])
model = freezer.load(folder, threads=threads)
ladder = freezer.verify(folder, threads=threads).ladder
print(model.manifest.device_class, len(model.ladder), ladder)
"""


def run_mounted(options: str, place: Path, code: str, artifact: Frozen, **env: str) -> Done:
    """Run code on an artifact with a new file system at `place`; skip where processes may not
    mount.
    """
    place.mkdir()
    inside = ("unshare", "--mount", "sh", "-c", MOUNT, options, place)
    if finished(*inside, "true").returncode != 0:
        pytest.skip("this process may not mount file systems")
    given = (artifact.artifact.folder, torch.get_num_threads())
    return finished(*inside, sys.executable, "-c", code, *given, env={**os.environ, **env})


def test_code_is_loaded_from_the_cache_if_need_be(inductor: Frozen, tmp_path: Path) -> None:
    place, cache = tmp_path / "mounted", tmp_path / "cache"
    done = run_mounted(
        "noexec", place, SERVE, inductor, TMPDIR=str(place), XDG_CACHE_HOME=str(cache)
    )
    assert done.stdout == f"{HERE} 0 ()\n", done.stderr
    assert (cache / "coldpress" / "tmp").exists()


def test_the_named_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDPRESS_TMPDIR", str(tmp_path / "own"))
    assert scratch_place(executable=True) == tmp_path / "own"
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLDPRESS_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(
        UsageError,
        match=(
            r"no temporary folder can be written: .*File exists.*; set COLDPRESS_TMPDIR to a folder"
        ),
    ):
        scratch_place()


OWNER = """
import sys, time
from freezer.files import scratch_folder
with scratch_folder() as folder:
    (folder / "weights").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(60)
"""


@contextmanager
def owner(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a temporary folder."""
    env = {**os.environ, "COLDPRESS_TMPDIR": str(place)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_remains_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Those of living processes, and folders of others, stay."""
    other = tmp_path / "other"
    other.mkdir()
    with owner(tmp_path) as (killed, left), owner(tmp_path) as (_, used):
        killed.kill()
        killed.wait()
        assert sorted(tmp_path.iterdir()) == sorted([left, used, other])
        with scratch_folder(place=tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([mine, used, other])
            assert (used / "weights").exists()
        assert sorted(tmp_path.iterdir()) == sorted([used, other])


def for_torch_alone(package: Path, dest: Path, *, damaged: bool) -> None:
    """Copy a package without the table of weights, so that torch's loader unpacks it."""
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(dest, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if damaged and info.filename.endswith(".so"):
                content = b"garbage"
            if Path(info.filename).name != TABLE:
                target.writestr(info, content)


def test_unpacked_packages_are_removed(
    inductor: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a package does not open, else with the model; torch's loader leaves them."""
    place = tmp_path / "place"
    monkeypatch.setenv("COLDPRESS_TMPDIR", str(place))
    package = inductor.artifact.folder / inductor.artifact.manifest.payloads[0].path
    for_torch_alone(package, tmp_path / "damaged.pt2", damaged=True)
    with pytest.raises(RuntimeError):
        open_inductor(tmp_path / "damaged.pt2", {})
    assert list(place.iterdir()) == []
    for_torch_alone(package, tmp_path / "good.pt2", damaged=False)
    run = open_inductor(tmp_path / "good.pt2", {})
    assert len(list(place.iterdir())) == 1
    x = random_inputs(2, 3, 16, 16)
    torch.testing.assert_close(run(x), open_inductor(package, {})(x))
    del run
    gc.collect()
    assert list(place.iterdir()) == []
