"""Speed: what is expected, what it is compared with, and what is said of a difference."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import freezer
from freezer.artifact.folder import Artifact
from freezer.artifact.manifest import Manifest
from freezer.artifact.sections import LatencyRecord
from freezer.codec import decode
from freezer.errors import IncompatibleError, SpeedError, UsageError
from freezer.hardware.cgroups import cpu_quota
from freezer.hardware.machine import detect
from freezer.limits import SamplingPolicy
from freezer.serving import speed_diagnosis
from freezer.serving.speed import check_speed, expected_ratio, portable_of
from freezer.serving.speed_diagnosis import causes, onednn_says
from freezer.store.store import Store
from tests.conftest import Frozen
from tests.freezer.hardware.test_cgroups import V2, tree
from tests.steps import HERE, QUICK, python

THREADS = torch.get_num_threads()


def promised(artifact: Artifact, speedup: float, **changes: Any) -> Artifact:
    """The artifact with a manifest that promises a speedup over eager."""
    latency = replace(artifact.manifest.latency or LatencyRecord(point={}), speedup=speedup, points=(), **changes)
    return Artifact(folder=artifact.folder, manifest=replace(artifact.manifest, latency=latency))


def with_latency(manifest: Manifest, latency: Mapping[str, Any] | None) -> Manifest:
    return replace(manifest, latency=None if latency is None else decode(LatencyRecord, {"point": {}, **latency}, origin="test"))


def test_expected_is_the_ratio_of_both_speedups_over_eager(scripted: Frozen, portable: Frozen) -> None:
    one, base = scripted.artifact.manifest, portable.artifact.manifest
    assert expected_ratio(with_latency(one, {"speedup": 3.0}), with_latency(base, {"speedup": 1.5}), 1) == 2.0
    disturbed = {"speedup": None, "eager_ms": {"p50": 6.0}, "ms": {"p50": 8.0}}
    assert expected_ratio(with_latency(one, {"speedup": 3.0}), with_latency(base, disturbed), 1) == 4.0
    cell = {"payload": "all", "eager_p50": None, "speedup_ci": None}
    cells = [
        {"threads": count, "point": {"batch": batch}, "speedup": count + batch / 10, **cell} for count in (1, 4) for batch in (1, 8)
    ]
    several = {"speedup": 1.1, "point": {"batch": 1}, "points": cells}
    for count, expected in ((1, 1.1), (4, 4.1), (2, 1.1)):
        assert expected_ratio(with_latency(one, several), with_latency(base, {"speedup": 1.0}), count) == expected
    for latency in (None, {"speedup": None, "eager_ms": {"p50": None}, "ms": {"p50": 8.0}}):
        with pytest.raises(UsageError, match="mlp for portable: the manifest holds no speedup over eager"):
            expected_ratio(with_latency(one, {"speedup": 3.0}), with_latency(base, latency), 1)


def test_an_artifact_that_keeps_its_promise(scripted: Frozen, portable: Frozen) -> None:
    found = check_speed(promised(scripted.artifact, 0.01), promised(portable.artifact, 1.0), THREADS, QUICK)
    assert found.expected == 0.01
    assert found.low <= found.measured <= found.high
    assert found.measured == pytest.approx(found.median_ms["portable"] / found.median_ms[HERE])
    assert (found.device_class, found.num_threads, found.point, found.num_dropped) == (HERE, THREADS, {"batch": 1}, 0)
    assert f"times as fast as portable here ({found.low:.2f} to " in str(found)
    assert torch.get_num_threads() == THREADS


def test_one_that_does_not_is_an_error_with_its_figures(scripted: Frozen, portable: Frozen) -> None:
    with pytest.raises(SpeedError, match=r"by the manifests it is 1000.00 times\. It answers right, at less than half") as caught:
        check_speed(promised(scripted.artifact, 1000.0), promised(portable.artifact, 1.0), THREADS, QUICK)
    assert caught.value.check is not None
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.check, again.code) == (str(caught.value), caught.value.check, "CP-SPEED")


def test_a_machine_that_is_too_busy_tells_nothing(scripted: Frozen, portable: Frozen) -> None:
    never = SamplingPolicy(time_limit_s=0.2, warmup_s=0.05, busy_limit=-1.0)
    with pytest.raises(
        SpeedError, match=r"cannot be told: 0 undisturbed rounds .*, \d+ were disturbed.*stop what else runs"
    ) as caught:
        check_speed(scripted.artifact, portable.artifact, THREADS, never)
    assert caught.value.check is None


# The portable artifact


def found_for(artifact: Artifact, reference: str | Path, store: Store | None = None, portable: Path | None = None) -> Artifact:
    with ExitStack() as stack:
        uri = str(store.root) if store else None
        return portable_of(reference, artifact.manifest, store=uri, portable=portable, stack=stack)


def test_the_portable_artifact_is_found(published: Store, scripted: Frozen, portable: Frozen) -> None:
    for found in (
        found_for(scripted.artifact, "mlp", published),
        found_for(scripted.artifact, scripted.artifact.folder, published),
        found_for(scripted.artifact, scripted.artifact.folder, portable=portable.artifact.folder),
    ):
        assert found.manifest.device_class == "portable"


def test_without_one_the_error_says_how(
    published: Store, scripted: Frozen, inductor: Frozen, portable: Frozen, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"not in the folder: --store URI names .*--portable DIR its folder"):
        freezer.verify(scripted.artifact.folder, speed=True)
    with pytest.raises(UsageError, match=f"is made for {HERE}, expected portable"):
        found_for(scripted.artifact, "mlp", portable=scripted.artifact.folder)
    with pytest.raises(UsageError, match="was made of other weights than"):
        found_for(inductor.artifact, inductor.artifact.folder, portable=portable.artifact.folder)
    alone = Store.open(str(tmp_path / "alone"), create=True)
    alone.publish("mlp", source_key="key", artifacts={HERE: scripted.artifact}, carried={})
    with pytest.raises(UsageError, match=f"mlp has no portable artifact to be compared with; published are {HERE}"):
        found_for(scripted.artifact, "mlp", alone)
    with pytest.raises(UsageError, match="--portable names the artifact"):
        freezer.verify("mlp", portable=portable.artifact.folder)


# What verify makes of it


def test_where_portable_serves_nothing_is_timed(portable: Frozen) -> None:
    assert freezer.verify(portable.artifact.folder, speed=True).speed is None


@pytest.mark.skipif(THREADS < 2, reason="needs two CPUs")
def test_a_refused_rung_is_the_answer(inductor: Frozen, portable: Frozen, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("conv", source_key="key", artifacts={HERE: inductor.artifact, "portable": portable.artifact}, carried={})
    assert freezer.verify("conv", store=str(store.root), threads=1).device_class == "portable"
    with pytest.raises(IncompatibleError, match=r"threads_mismatch.*portable would serve instead, so nothing was timed") as caught:
        freezer.verify("conv", store=str(store.root), threads=1, speed=True)
    assert [refusal.reason for refusal in caught.value.ladder] == ["threads_mismatch"]


# What differs


def told(artifact: Artifact, num_threads: int = THREADS, num_dropped: int = 0, **changes: Any) -> str:
    manifest = replace(artifact.manifest, **changes)
    return "\n".join(causes(manifest, artifact.manifest, num_threads, int, num_rounds=10, num_dropped=num_dropped))


def test_nothing_is_said_of_what_is_as_it_was(scripted: Frozen) -> None:
    assert told(scripted.artifact) == ""


def test_what_differs_is_named(scripted: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = scripted.artifact
    host = {**artifact.manifest.provenance["host"], "cpu": "another CPU", "classes": ["cpu-other"]}
    for sentence, found in (
        (
            f"CPU: {artifact.manifest.provenance['host']['cpu']} here, another CPU where it was judged",
            told(artifact, provenance={"host": host}),
        ),
        (
            f"class: this process runs {best_class()} at best, that of its judge cpu-other",
            told(artifact, provenance={"host": host}),
        ),
        (f"torch: {torch.__version__} here, 2.1.0 where it was made", told(artifact, toolchain={"torch": "2.1.0"})),
        (f"threads: {THREADS + 1} here, {THREADS} where it was judged", told(artifact, THREADS + 1)),
        ("load: others disturbed 3 of 13 rounds", told(artifact, num_dropped=3)),
    ):
        assert sentence in found
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    lines = told(artifact).splitlines()
    assert lines[0] == "ISA limit: ONEDNN_MAX_CPU_ISA=AVX2 here, none in the manifest"
    assert lines[1].startswith("ISA limit: the process was started with ONEDNN_MAX_CPU_ISA unset; ONEDNN_MAX_CPU_ISA=AVX2 now")
    assert "threads: OMP_NUM_THREADS=64 here, none in the manifest" in lines
    assert "allocator and OpenMP runtime: LD_PRELOAD=libtcmalloc.so here, none in the manifest" in lines
    judged = {**host, "environment": {"LD_PRELOAD": "other.so"}}
    assert "LD_PRELOAD=libtcmalloc.so here, LD_PRELOAD=other.so where it was judged" in told(artifact, provenance={"host": judged})


def best_class() -> str:
    return detect().classes[0]


def test_more_threads_than_cpus_is_told(scripted: Frozen) -> None:
    many = len(os.sched_getaffinity(0)) + 1
    assert f"threads: {many} share {many - 1} CPUs, which is all that the affinity of this process allows" in told(
        scripted.artifact, many
    )


def test_a_quota_of_the_control_group_is_told(scripted: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, quota in (("50000 100000\n", 0.5), ("max 100000\n", None), ("odd\n", None)):
        root = tree(tmp_path, "0::/a\n", V2, {"sys/fs/cgroup/a/cpu.max": text})
        monkeypatch.setattr(speed_diagnosis, "cpu_quota", partial(cpu_quota, root))
        line = f"threads: {THREADS} share a quota of 0.5 CPUs, which the control group of this process sets"
        assert (line in told(scripted.artifact)) == (quota is not None)


SAYS = """
import torch
from freezer.serving.speed_diagnosis import onednn_says
weight = torch.zeros(64, 64, 3, 3)
print("before")
print(onednn_says(lambda: torch.nn.functional.conv2d(torch.zeros(1, 64, 56, 56), weight)))
print("after", torch.nn.functional.conv2d(torch.zeros(1, 64, 56, 56), weight).shape)
"""


def test_onednn_itself_is_asked() -> None:
    before, said, after = python(SAYS).splitlines()
    assert (before, after.startswith("after")) == ("before", True), "and its words are nowhere else"
    assert "'convolution " in said
    assert onednn_says(int)[1] == {}
