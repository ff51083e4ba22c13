"""Full disks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a full file system of one page.

    Skip the test if mounting is not allowed.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        (folder / "ballast").write_bytes(b"\0" * 4096)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
