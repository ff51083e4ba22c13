"""The speed check: expectation, comparison with the portable artifact, and diagnosis."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact, LatencyRecord, PointFigures
from freezer.errors import IncompatibleError, NotPublishedError, SpeedError, UsageError
from freezer.runtime.devices import host_fingerprint
from freezer.serving.images import resolve_reference
from freezer.serving.speed import (
    check_same_weights,
    check_speed,
    differences,
    expected_ratio,
    fetch_portable,
)
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
    cell = PointFigures(
        num_threads=4,
        point={"batch": 1},
        payload="all",
        eager_p50=None,
        speedup=4.0,
        speedup_ci=None,
    )
    own = LatencyRecord(point={"batch": 1}, speedup=3.0, points=(cell,))
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
    assert (check.device_class, check.num_threads, check.point) == (HERE, THREADS, {"batch": 1})
    assert f"times as fast as portable here ({check.low:.2f} to " in str(check)
    assert torch.get_num_threads() == THREADS


def test_a_slow_artifact_raises_with_figures(scripted: Frozen, portable: Frozen) -> None:
    slow, base = promised(scripted.artifact, 1000.0), promised(portable.artifact, 1.0)
    with pytest.raises(SpeedError, match=r"1000.00 times") as caught:
        check_speed(slow, base, THREADS, QUICK)
    error = caught.value
    assert error.check is not None
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.check, again.code) == (str(error), error.check, "CP-SPEED")


# The portable artifact


def fetched_for(artifact: Artifact, reference: str | Path, store: Store) -> Artifact:
    uri = str(store.root)
    with ExitStack() as stack:
        return fetch_portable(
            reference, artifact.manifest, resolve_reference(reference, uri), uri, stack
        )


def test_a_missing_portable_artifact_raises(
    published: Store, scripted: Frozen, inductor: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="not in this folder"):
        freezer.verify(scripted.artifact.folder, speed=True)
    with pytest.raises(UsageError, match="was made of other weights than"):
        check_same_weights(inductor.artifact.folder, inductor.artifact.manifest, portable.artifact)
    alone = Store.open(str(tmp_path / "alone"), create=True)
    alone.publish("mlp", source_key="key", artifacts=[scripted.artifact])
    with pytest.raises(UsageError, match="mlp has no portable artifact"):
        fetched_for(scripted.artifact, "mlp", alone)
    with pytest.raises(UsageError, match="--portable names the artifact"):
        freezer.verify("mlp", portable=portable.artifact.folder)


# verify


def test_portable_itself_is_not_timed(portable: Frozen) -> None:
    folder = portable.artifact.folder
    assert freezer.verify(folder, speed=True).speed is None
    assert freezer.verify(folder, speed=True, portable=folder).speed is None


def test_a_wrong_portable_folder_raises_before_anything_else(
    scripted: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    folder = portable.artifact.folder
    with pytest.raises(NotPublishedError):
        freezer.verify(folder, speed=True, portable=tmp_path)
    with pytest.raises(UsageError, match=f"is made for {HERE}, expected portable"):
        freezer.verify(folder, speed=True, portable=scripted.artifact.folder)


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
        match=r"threads_mismatch.*portable would serve instead, so nothing was timed",
    ) as caught:
        freezer.verify("conv", store=str(store.root), threads=1, speed=True)
    assert [refusal.reason for refusal in caught.value.ladder] == ["threads_mismatch"]


# Diagnosis


def test_differences_from_the_judge_are_listed(
    scripted: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = scripted.artifact.manifest
    host = manifest.provenance["host"]
    here = {**host, "environment": host_fingerprint()["environment"]}
    assert not list(differences(replace(manifest, provenance={"host": here})))
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    other = replace(
        manifest,
        provenance={"host": {**here, "cpu": "another CPU"}},
        toolchain={"torch": "2.1.0"},
    )
    assert list(differences(other)) == [
        f"CPU: {host['cpu']} here, another CPU where it was judged",
        "LD_PRELOAD: libtcmalloc.so here, unset where it was judged",
        f"torch: {torch.__version__} here, 2.1.0 where it was judged",
    ]
