"""CPU time of other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from freezer.timing.disturbers import Usage, cpu_times, most_active


def test_cpu_time_of_other_processes_is_read() -> None:
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        used_s = {pid: usage.used_s for pid, usage in cpu_times().items()}
    finally:
        hog.kill()
        hog.wait()
    assert used_s[hog.pid] > 0
    assert os.getpid() not in used_s


def test_names_may_contain_parentheses(tmp_path: Path) -> None:
    for pid, name, ticks in ((7, "a (b) c", 200), (8, "idle", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} ({name}) R {'0 ' * 10}{ticks} 0 900 0 20 0"
        )
    used_s = 200 / os.sysconf("SC_CLK_TCK")
    assert most_active({}, cpu_times(tmp_path), 2 * used_s) == "a (b) c (pid 7) 50% of a CPU"


def test_time_before_a_change_of_name_does_not_count() -> None:
    """The kernel's workers rename themselves, and so does a process that executes another
    program.
    """
    before, now = {32: Usage("kworker/0:1-events", 9.0)}, {32: Usage("kworker/0:1-mm", 9.5)}
    assert most_active(before, now, 1.0) == "kworker/0:1-mm (pid 32) 50% of a CPU"
