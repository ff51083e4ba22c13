"""A driver that joins a cluster whose Ray dies, and drivers that end by themselves."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.raylets import ROOT, wait_until

DRIVER = """
import os, sys, time
from functools import partial
from freezer.cli import answer_signals
from jobs.optimize import exits
from pipeline.cluster import in_child
answer_signals("stop")
with exits():
    sys.exit(in_child(exits()(partial(exec, sys.argv[1], globals()))))
"""


def driver(code: str) -> subprocess.Popen[str]:
    """A command whose driver runs some code."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (0, False)),
        ("1 / 0", (1, False)),
        ("from freezer.errors import UsageError; raise UsageError()", (2, False)),
        ("os._exit(1)", (3, True)),
        ("os.abort()", (3, True)),
    ],
)
def test_only_an_unreported_end_is_rays(code: str, expected: tuple[int, bool]) -> None:
    with driver(code) as process:
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, "CP-RAY: " in said) == expected, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_driver(number: signal.Signals) -> None:
    with driver("print(os.getpid(), flush=True); time.sleep(60)") as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: not child.is_running(), "the driver has ended", 10)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
