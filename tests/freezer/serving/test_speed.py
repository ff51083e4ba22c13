"""The speed check: expectation, and comparison with the portable artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact, LatencyRecord, PointFigures
from freezer.errors import IncompatibleError, SpeedError, UsageError
from freezer.serving.speed import check_speed, expected_ratio
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.steps import HERE, QUICK

THREADS = torch.get_num_threads()


def promised(artifact: Artifact, speedup: float, **changes: Any) -> Artifact:
    """The artifact with a manifest that promises a speedup over eager."""
    latency = replace(
        artifact.manifest.latency or LatencyRecord(point={}), speedup=speedup, points=(), **changes
    )
    return Artifact(folder=artifact.folder, manifest=replace(artifact.manifest, latency=latency))


def test_expected_ratio_of_speedups_over_eager(scripted: Frozen, portable: Frozen) -> None:
    nothing: dict[str, Any] = {"eager_p50": None, "speedup_ci": None}
    point = {"batch": 1}
    cell = PointFigures(num_threads=4, point=point, payload="all", speedup=4.0, **nothing)
    own = LatencyRecord(point=point, speedup=3.0, points=(cell,))
    manifest = replace(scripted.artifact.manifest, latency=own)

    def expected(num_threads: int, **figures: Any) -> float:
        base = LatencyRecord(point={}, **figures)
        other = replace(portable.artifact.manifest, latency=base)
        return expected_ratio(manifest, other, num_threads)

    assert [expected(count, speedup=0.5) for count in (1, 2, 4)] == [6.0, 6.0, 8.0]
    assert expected(1, speedup=None, eager_ms={"p50": 6.0}, ms={"p50": 8.0}) == 4.0
    with pytest.raises(UsageError):
        expected(1, speedup=None, eager_ms={"p50": None}, ms={"p50": 8.0})


def test_an_artifact_as_fast_as_promised(scripted: Frozen, portable: Frozen) -> None:
    check = check_speed(
        promised(scripted.artifact, 0.01), promised(portable.artifact, 1.0), THREADS, QUICK
    )
    assert check.expected == 0.01
    assert check.low <= check.measured <= check.high
    ratio = check.median_ms["portable"] / check.median_ms[HERE]
    assert check.measured == pytest.approx(ratio, rel=0.5), "of rounds, not of calls"
    assert (check.device_class, check.num_threads) == (HERE, THREADS)
    assert f"times as fast as portable here ({check.low:.2f} to " in str(check)
    assert torch.get_num_threads() == THREADS


def test_a_slow_artifact_raises_with_figures(scripted: Frozen, portable: Frozen) -> None:
    slow, base = promised(scripted.artifact, 1000.0), promised(portable.artifact, 1.0)
    with pytest.raises(SpeedError, match=r"by the manifests 1000.00 times"):
        check_speed(slow, base, THREADS, QUICK)


# verify


def test_a_missing_portable_artifact_raises(scripted: Frozen, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        freezer.verify(scripted.artifact.folder, speed=True)
    alone = Store.open(str(tmp_path / "alone"), create=True)
    alone.publish("mlp", source_key="key", artifacts=[scripted.artifact])
    with pytest.raises(UsageError):
        freezer.verify("mlp", store=str(alone.root), speed=True)


def test_portable_itself_is_not_timed(portable: Frozen) -> None:
    assert freezer.verify(portable.artifact.folder, speed=True).speed is None


@pytest.mark.skipif(THREADS < 2, reason="needs two CPUs")
def test_speed_raises_if_the_best_is_refused(
    inductor: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish(
        "conv",
        source_key="key",
        artifacts=[inductor.artifact, portable.artifact],
    )
    assert freezer.verify("conv", store=str(store.root), threads=1).device_class == "portable"
    with pytest.raises(
        IncompatibleError,
        match=r"threads_mismatch.*so nothing was timed",
    ) as caught:
        freezer.verify("conv", store=str(store.root), threads=1, speed=True)
    assert [refusal.reason for refusal in caught.value.ladder] == ["threads_mismatch"]
