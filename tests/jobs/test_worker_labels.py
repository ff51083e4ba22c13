"""Output of `coldpress worker-labels` on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from freezer.errors import UsageError
from freezer.hardware import PORTABLE, available_cpus, detect, device_class
from jobs.worker_labels import this_worker
from tests.support.commands import Done, finished
from tests.support.raylets import ROOT

OF_RAY = {"RAY_worker_niceness": "0", "RAY_num_workers_soft_limit": str(2 * available_cpus())}
CLASSES = [name for name in detect().classes if name != PORTABLE]


def printed(*arguments: str) -> Done:
    return finished(sys.executable, "-m", "jobs.worker_labels", *arguments, cwd=ROOT)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without Ray's token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_sent_where_one_exists(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start --head` demands the token of an earlier local Ray; `ray start --address` sends it
    only in this mode.
    """
    assert this_worker(()).environment == OF_RAY
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(64 * "0")
    assert this_worker(()).environment == {**OF_RAY, "RAY_AUTH_MODE": "token"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert this_worker(()).environment == OF_RAY
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
    assert this_worker(()).environment == OF_RAY
    monkeypatch.setenv("RAY_AUTH_TOKEN", 64 * "0")
    assert this_worker(()).environment == {**OF_RAY, "RAY_AUTH_MODE": "token"}


def test_arguments_for_this_machine() -> None:
    done = printed()
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == f"--labels={','.join(f'coldpress.dev/{name}=true' for name in CLASSES)}"
    assert f"--num-cpus={available_cpus()}" in words
    assert all(word.startswith("--") for word in words)
    memory_bytes = int(words[3].removeprefix("--memory="))
    assert 0 < memory_bytes <= 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    environment = printed("--environment").stdout.split()
    assert environment == [f"{name}={value}" for name, value in OF_RAY.items()]


@pytest.mark.skipif(len(CLASSES) < 2, reason="needs a CPU of two classes")
def test_a_lesser_class_sets_its_limits() -> None:
    lesser = CLASSES[-1]
    worker = this_worker([lesser])
    assert f"--labels=coldpress.dev/{lesser}=true" in worker.arguments
    limits = device_class(lesser).limits
    assert worker.environment == {**OF_RAY, **limits}
    assert printed("--device-class", lesser, "--environment").stdout.split() == [
        f"{name}={value}" for name, value in worker.environment.items()
    ]
    assert detect({**os.environ, **limits}).classes == (lesser, PORTABLE)


def test_unavailable_classes_are_rejected() -> None:
    done = printed("--device-class", "cpu-neoverse-v1")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "CP-DEVICE-CLASS: this machine cannot serve cpu-neoverse-v1: the "
    )
    with pytest.raises(UsageError):
        this_worker(["cpu-x86"])
    with pytest.raises(UsageError):
        this_worker([PORTABLE])
