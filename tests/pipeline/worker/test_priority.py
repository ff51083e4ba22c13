"""The priority of judges, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
BEGIN = "import os; from pipeline.worker.tasks import come_first; os.setpriority(os.PRIO_PROCESS, 0, {}); {}; print(come_first())"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to come before others")
@pytest.mark.parametrize(
    ("before", "user", "after"),
    [(15, 0, -10), (0, 0, -10), (-15, 0, -15), (15, NOBODY, 15), (0, NOBODY, 0), (-5, NOBODY, -5)],
)
def test_judge_takes_the_best_allowed_niceness(before: int, user: int, after: int) -> None:
    code = BEGIN.format(before, f"os.setuid({user})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == after
