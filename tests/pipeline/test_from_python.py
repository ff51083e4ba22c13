"""A campaign from Python, in a thread with a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest

import pipeline
from tests.support.drive import POLICY


@pytest.mark.cluster
@pytest.mark.slow
def test_a_campaign_runs_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = pipeline.Entry(
        name="mlp",
        source="python:tests.support.models:mlp",
        inputs=({"shape": [1, 4]},),
        device_classes=["portable"],
    )
    handler = signal.getsignal(signal.SIGTERM)
    reports = []

    async def cell() -> None:
        reports.append(pipeline.run(pipeline.Config(catalog=[entry], policy=POLICY)))

    thread = threading.Thread(target=lambda: asyncio.run(cell()))
    thread.start()
    thread.join()
    (outcome,) = reports[0].outcomes
    assert (reports[0].exit_code, outcome.verdict) == (0, "published")
    assert signal.getsignal(signal.SIGTERM) == handler
