"""Temporary folders on file systems that are read-only or do not allow execution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freezer.errors import UsageError
from freezer.files import scratch_place
from tests.conftest import Frozen
from tests.support.steps import HERE

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

VERIFY = """
import sys
from freezer.cli import main
sys.argv = ["coldpress", "verify", sys.argv[1], "--threads", sys.argv[2]]
main()
"""


def run_mounted(
    options: str, place: Path, code: str, artifact: Frozen, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run code on an artifact with a new file system at `place`; skip where processes may not
    mount.
    """
    place.mkdir()
    inside = ["unshare", "--mount", "sh", "-c", MOUNT, options, str(place)]
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this process may not mount file systems")
    command = [
        *inside,
        sys.executable,
        "-c",
        code,
        str(artifact.artifact.folder),
        str(torch.get_num_threads()),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}, timeout=120
    )


@pytest.mark.parametrize("options", ["noexec", "ro"])
def test_code_is_loaded_from_the_cache_if_need_be(
    inductor: Frozen, tmp_path: Path, options: str
) -> None:
    place, cache = tmp_path / "mounted", tmp_path / "cache"
    done = run_mounted(
        options, place, SERVE, inductor, TMPDIR=str(place), XDG_CACHE_HOME=str(cache)
    )
    assert done.stdout == f"{HERE} 0 ()\n", done.stderr
    assert (cache / "coldpress" / "tmp").exists() == (options == "noexec"), (
        "tempfile passes over read-only folders"
    )


def test_a_folder_without_execution_is_named(inductor: Frozen, tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    done = run_mounted("noexec", place, VERIFY, inductor, COLDPRESS_TMPDIR=str(place))
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1]
        == f"CP-TEMPORARY: no temporary folder allows code to be loaded from its files: {place}:"
        " mounted with noexec; set COLDPRESS_TMPDIR to a folder that does"
    )


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
