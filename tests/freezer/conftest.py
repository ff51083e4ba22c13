"""A real control group for tests of limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group of this machine with a quota of one CPU; the test is skipped where none may
    be made.
    """
    made = None
    try:
        if (Path("/sys/fs/cgroup/cgroup.controllers")).exists():
            made = Path(f"/sys/fs/cgroup/coldpress-test-{os.getpid()}")
            made.mkdir()
            (made / "cpu.max").write_text("100000 100000")
        else:
            made = Path(f"/sys/fs/cgroup/cpu/coldpress-test-{os.getpid()}")
            made.mkdir()
            (made / "cpu.cfs_period_us").write_text("100000")
            (made / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        if made is not None and made.exists():
            made.rmdir()
        pytest.skip(f"no control group with a quota can be made here: {error}")
    yield made
    made.rmdir()
