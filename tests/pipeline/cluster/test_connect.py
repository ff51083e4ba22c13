"""Connecting to Ray: a local one that does not start."""

from __future__ import annotations

import pytest

from freezer.errors import InfrastructureError
from pipeline.cluster import connect


def test_local_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception, here after half a minute on a busy machine."""

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002

    for name in (
        "RAY_worker_niceness",
        "RAY_num_workers_soft_limit",
    ):  # `connect` sets them where they are not set
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with (
        pytest.raises(
            InfrastructureError, match=r"^no local Ray starts: The current node timed out"
        ),
        connect(None),
    ):
        pass
