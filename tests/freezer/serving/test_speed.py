"""The speed check: expectation, comparison with the portable artifact, and diagnosis."""

from __future__ import annotations

import os
import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact import Artifact, LatencyRecord, PointFigures
from freezer.errors import IncompatibleError, NotPublishedError, SpeedCheck, SpeedError, UsageError
from freezer.hardware import available_cpus
from freezer.runtime.devices import host_fingerprint
from freezer.serving.images import resolve_reference
from freezer.serving.speed import (
    check_same_weights,
    check_speed,
    differences,
    expected_ratio,
    fetch_portable,
    read_portable,
)
from freezer.spec import SamplingPolicy
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
    def expected(own: LatencyRecord, base: LatencyRecord | None, num_threads: int = 1) -> float:
        one, other = scripted.artifact.manifest, portable.artifact.manifest
        return expected_ratio(replace(one, latency=own), replace(other, latency=base), num_threads)

    def judged(speedup: float | None, **changes: Any) -> LatencyRecord:
        return LatencyRecord(point={}, speedup=speedup, **changes)

    assert expected(judged(3.0), judged(1.5)) == 2.0
    assert expected(judged(3.0), judged(None, eager_ms={"p50": 6.0}, ms={"p50": 8.0})) == 4.0
    points = tuple(
        PointFigures(
            num_threads=count,
            point={"batch": size},
            payload="all",
            eager_p50=None,
            speedup=count + size / 10,
            speedup_ci=None,
        )
        for count in (1, 4)
        for size in (1, 8)
    )
    several = LatencyRecord(point={"batch": 1}, speedup=1.1, points=points)
    assert [expected(several, judged(1.0), count) for count in (1, 4, 2)] == [1.1, 4.1, 1.1]
    for base in (None, judged(None, eager_ms={"p50": None}, ms={"p50": 8.0})):
        with pytest.raises(
            UsageError, match="mlp for portable: the manifest has no speedup over eager"
        ):
            expected(judged(3.0), base)


def test_an_artifact_as_fast_as_promised(scripted: Frozen, portable: Frozen) -> None:
    found = check_speed(
        promised(scripted.artifact, 0.01), promised(portable.artifact, 1.0), THREADS, QUICK
    )
    assert found.expected == 0.01
    assert found.low <= found.measured <= found.high
    assert found.measured == pytest.approx(
        found.median_ms["portable"] / found.median_ms[HERE], rel=0.5
    ), "of rounds, not of calls"
    assert (found.device_class, found.num_threads, found.point, found.num_dropped) == (
        HERE,
        THREADS,
        {"batch": 1},
        0,
    )
    assert f"times as fast as portable here ({found.low:.2f} to " in str(found)
    assert torch.get_num_threads() == THREADS


def test_a_slow_artifact_raises_with_figures(scripted: Frozen, portable: Frozen) -> None:
    with pytest.raises(
        SpeedError, match=r"by the manifests it is 1000.00 times\. Its results are correct"
    ) as caught:
        check_speed(
            promised(scripted.artifact, 1000.0), promised(portable.artifact, 1.0), THREADS, QUICK
        )
    assert caught.value.check is not None
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.check, again.code) == (
        str(caught.value),
        caught.value.check,
        "CP-SPEED",
    )


def test_a_busy_machine_raises(scripted: Frozen, portable: Frozen) -> None:
    never = SamplingPolicy(time_limit_s=0.2, warmup_s=0.05, busy_limit=-1.0)
    with pytest.raises(
        SpeedError, match=r"only 0 undisturbed rounds .*\d+ dropped.*stop other processes"
    ) as caught:
        check_speed(scripted.artifact, portable.artifact, THREADS, never)
    assert caught.value.check is None


# The portable artifact


def fetched_for(artifact: Artifact, reference: str | Path, store: Store) -> Artifact:
    uri = str(store.root)
    with ExitStack() as stack:
        return fetch_portable(
            reference, artifact.manifest, resolve_reference(reference, uri), uri, stack
        )


def test_the_portable_artifact_is_fetched(published: Store, scripted: Frozen) -> None:
    for reference in ("mlp", scripted.artifact.folder):
        assert (
            fetched_for(scripted.artifact, reference, published).manifest.device_class == "portable"
        )


def test_a_missing_portable_artifact_raises(
    published: Store, scripted: Frozen, inductor: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"not in this folder: use --store URI .*--portable DIR"):
        freezer.verify(scripted.artifact.folder, speed=True)
    with pytest.raises(UsageError, match=f"is made for {HERE}, expected portable"):
        read_portable(scripted.artifact.folder)
    with pytest.raises(UsageError, match="was made of other weights than"):
        check_same_weights(inductor.artifact.folder, inductor.artifact.manifest, portable.artifact)
    alone = Store.open(str(tmp_path / "alone"), create=True)
    alone.publish("mlp", source_key="key", artifacts=[scripted.artifact])
    with pytest.raises(
        UsageError, match=f"mlp has no portable artifact to compare with; published are {HERE}"
    ):
        fetched_for(scripted.artifact, "mlp", alone)
    with pytest.raises(UsageError, match="--portable names the artifact"):
        freezer.verify("mlp", portable=portable.artifact.folder)


# verify


def test_portable_itself_is_not_timed(portable: Frozen) -> None:
    assert freezer.verify(portable.artifact.folder, speed=True).speed is None
    assert (
        freezer.verify(
            portable.artifact.folder, speed=True, portable=portable.artifact.folder
        ).speed
        is None
    )


def test_a_wrong_portable_folder_raises_before_anything_else(
    scripted: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    with pytest.raises(NotPublishedError, match=r"contains no manifest\.json"):
        freezer.verify(portable.artifact.folder, speed=True, portable=tmp_path)
    with pytest.raises(UsageError, match=f"is made for {HERE}, expected portable"):
        freezer.verify(portable.artifact.folder, speed=True, portable=scripted.artifact.folder)


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


def diagnosis(
    artifact: Artifact, num_threads: int = THREADS, num_dropped: int = 0, **changes: Any
) -> str:
    timed = SpeedCheck(
        device_class=HERE,
        expected=2.0,
        measured=0.5,
        low=0.4,
        high=0.6,
        num_threads=num_threads,
        point={},
        median_ms={},
        num_rounds=10,
        num_dropped=num_dropped,
    )
    return "\n".join(differences(replace(artifact.manifest, **changes), timed))


def judged_with(artifact: Artifact, *counts: int) -> Artifact:
    """The artifact as if it had been judged with these thread counts."""
    cell = PointFigures(
        num_threads=1, point={}, payload="all", eager_p50=None, speedup=1.0, speedup_ci=None
    )
    latency = LatencyRecord(
        point={},
        num_threads=counts[0],
        points=tuple(replace(cell, num_threads=count) for count in counts),
    )
    return Artifact(folder=artifact.folder, manifest=replace(artifact.manifest, latency=latency))


def test_every_difference_is_listed(scripted: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = scripted.artifact
    here = {
        **artifact.manifest.provenance["host"],
        "environment": host_fingerprint()["environment"],
    }
    assert diagnosis(artifact, provenance={"host": here}) == ""
    many = len(os.sched_getaffinity(0)) + 1
    host = {**artifact.manifest.provenance["host"], "cpu": "another CPU"}
    for sentence, found in (
        (f"threads: {many} share {available_cpus()} CPUs", diagnosis(artifact, many)),
        ("here, another CPU where it was judged", diagnosis(artifact, provenance={"host": host})),
        (
            f"torch: {torch.__version__} here, 2.1.0 where it was judged",
            diagnosis(artifact, toolchain={"torch": "2.1.0"}),
        ),
        (
            f"threads: {THREADS + 1} here, {THREADS} where it was judged",
            diagnosis(artifact, THREADS + 1),
        ),
        (
            "threads: 5 here, 1 or 8 or 64 where it was judged",
            diagnosis(judged_with(artifact, 64, 8, 1), 5),
        ),
        ("load: others disturbed 3 of 13 rounds", diagnosis(artifact, num_dropped=3)),
    ):
        assert sentence in found
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = {
        name: value
        for name, value in host_fingerprint()["environment"].items()
        if name != "ONEDNN_MAX_CPU_ISA"
    }
    judged = {
        **host,
        "environment": {**environment, "LD_PRELOAD": "other.so", "OMP_NUM_THREADS": "4"},
    }
    lines = diagnosis(artifact, provenance={"host": judged}).splitlines()
    assert lines[:3] == [
        "LD_PRELOAD: libtcmalloc.so here, other.so where it was judged",
        "OMP_NUM_THREADS: unset here, 4 where it was judged",
        "ONEDNN_MAX_CPU_ISA: AVX2 here, unset where it was judged",
    ]
