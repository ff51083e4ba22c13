"""`coldpress env`, and the settings that `coldpress run` applies and `load` reports."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from freezer.artifact import Artifact, EnvironmentRecord, SettingGain
from freezer.serving.load import load
from tests.conftest import Frozen
from tests.freezer.cli.conftest import Run
from tests.support.steps import copy_of, random_inputs

JEMALLOC = "libjemalloc.so.2"

GAIN = EnvironmentRecord(
    variables={"LD_PRELOAD": JEMALLOC, "THP_MEM_ALLOC_ENABLE": "1"},
    plain_p50=72.0,
    p50=40.0,
    gain=1.8,
    gain_ci=(1.7, 1.9),
    page_faults=5000.0,
)

MARKED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void start(void) {
    const char *path = getenv("MARK"), *pages = getenv("THP_MEM_ALLOC_ENABLE");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) { fputs(pages ? pages : "none", file); fclose(file); }
}
"""
"""A library that records in a file that it was loaded, and a variable."""


def recorded(scripted: Frozen, folder: Path, environment: EnvironmentRecord) -> Artifact:
    """A copy of an artifact whose manifest records an effect of runtime settings."""
    latency = scripted.artifact.manifest.latency
    assert latency is not None
    return copy_of(scripted.artifact, folder, latency=replace(latency, environment=environment))


@pytest.fixture
def gaining(scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """An artifact that gained from settings, in an environment without any."""
    for name in ("LD_PRELOAD", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    return recorded(scripted, tmp_path / "artifact", GAIN)


def evaluated(lines: str) -> str:
    """Values of the variables after a shell evaluated the lines."""
    script = 'eval "$LINES"; printf "%s %s" "$LD_PRELOAD" "$THP_MEM_ALLOC_ENABLE"'
    done = subprocess.run(
        ["sh", "-c", script], env={"LINES": lines}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_env_prints_what_a_shell_evaluates(
    coldpress: Run, gaining: Artifact, tmp_path: Path
) -> None:
    code, out, _ = coldpress("env", gaining.folder)
    assert code == 0
    assert f"# {JEMALLOC} is not installed here: " in out
    assert "1.80 times as fast (1.70 to 1.90; p50 40 instead of 72 ms)" in out.splitlines()[0]
    (tmp_path / "lib" / JEMALLOC).touch()
    _, out, _ = coldpress("env", gaining.folder)
    assert evaluated(out) == f"{tmp_path / 'lib' / JEMALLOC} 1"


def test_env_without_a_gain(coldpress: Run, scripted: Frozen, tmp_path: Path) -> None:
    tried = SettingGain(
        variables={"THP_MEM_ALLOC_ENABLE": "1"},
        gain=1.01,
        gain_ci=(0.98, 1.03),
        problem="no gain beyond noise",
    )
    for artifact, what in (
        (scripted.artifact, "no setting was tried"),
        (
            recorded(scripted, tmp_path / "one", EnvironmentRecord(tried=(tried,))),
            "(tried: THP_MEM_ALLOC_ENABLE=1)",
        ),
        (
            recorded(scripted, tmp_path / "two", EnvironmentRecord()),
            "(tried: none that is installed there could gain)",
        ),
    ):
        code, out, _ = coldpress("env", artifact.folder)
        assert code == 0
        assert all(line.startswith("#") for line in out.splitlines())
        assert what in out


def test_a_manifest_cannot_make_the_shell_run_commands(
    coldpress: Run, scripted: Frozen, tmp_path: Path
) -> None:
    command = f"touch {tmp_path / 'ran'}"
    evil = (
        {"LD_PRELOAD": f"x\n{command}"},
        {f"A\r\n{command}\n": "1"},
        {"KMP_BLOCKTIME": f"1;{command}"},
    )
    for number, variables in enumerate(evil):
        artifact = recorded(
            scripted, tmp_path / f"artifact{number}", replace(GAIN, variables=variables)
        )
        evaluated(coldpress("env", artifact.folder)[1])
    assert not (tmp_path / "ran").exists()


def test_inspect_shows_the_settings(coldpress: Run, gaining: Artifact) -> None:
    _, out, _ = coldpress("inspect", gaining.folder)
    assert "1.80 times as fast" in " ".join(out.split())


def test_load_reports_settings_that_the_process_lacks(
    gaining: Artifact, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, logger="coldpress"):
        load(gaining.folder)
    assert "this process started without: see `coldpress env`" in caplog.text
    caplog.clear()
    monkeypatch.setenv("LD_PRELOAD", f"/somewhere/{JEMALLOC}")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    with caplog.at_level(logging.INFO, logger="coldpress"):
        load(gaining.folder)
    assert "coldpress env" not in caplog.text


def test_run_applies_the_settings(gaining: Artifact, tmp_path: Path) -> None:
    library, mark = tmp_path / "lib" / JEMALLOC, tmp_path / "mark"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=MARKED, text=True, check=True)
    save_file({"x": random_inputs(2, 4)}, tmp_path / "x.safetensors")
    arguments = [
        "run",
        gaining.folder,
        "--input",
        tmp_path / "x.safetensors",
        "--output",
        tmp_path / "y.safetensors",
    ]
    command = [sys.executable, "-m", "freezer.cli", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "MARK": str(mark)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"with LD_PRELOAD={library} THP_MEM_ALLOC_ENABLE=1"
    assert mark.read_text() == "1"
    assert load_file(tmp_path / "y.safetensors")
