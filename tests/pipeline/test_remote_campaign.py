"""Campaigns whose store is a bucket, the only thing that the machines share."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import freezer
from freezer.hardware import PORTABLE
from freezer.store import Store
from tests.support.buckets import objects
from tests.support.campaign_runs import (
    built_in,
    drive,
    environment,
    outcomes,
    run,
    slow_catalog,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def command_of(folder: Path, bucket: str, campaign: str = "test") -> list[str]:
    """Return the command of a quick campaign that publishes to a bucket."""
    words = drive(folder, campaign)
    return [*(bucket if word == str(folder / "store") else word for word in words), PORTABLE]


def test_killed_campaign_continues_from_the_bucket(
    bucket: str, s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_catalog(tmp_path, 2)
    command = command_of(tmp_path, bucket)
    with subprocess.Popen(
        command, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        first = wait_for(process, " built m0")
        process.send_signal(signal.SIGKILL)
        first += process.communicate(timeout=60)[0] or ""
    done = built_in(first)
    assert done
    time.sleep(5)  # until the cluster of the killed driver has ended
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    again = run(command, tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert built_in(again.stdout).isdisjoint(done)
    assert {name: found["verdict"] for name, found in outcomes(tmp_path).items()} == {
        (f"m{i}", PORTABLE): "published" for i in range(2)
    }
    store = Store.open(bucket)
    assert [store.versions(f"m{i}") for i in range(2)] == [[1], [1]]
    model = freezer.load("m0", store=bucket)
    assert model(torch.ones(1, 8)).shape[0] == 1
    left = objects(s3_address, bucket.removeprefix("s3://"))
    work = sorted({name.split("/")[1] for name in left if name.startswith(".coldpress/")})
    assert work == ["candidates", "ledger", "logs", "weights"], (
        "no judged result, lock or lease is left"
    )
