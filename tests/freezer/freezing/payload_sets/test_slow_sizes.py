"""Sizes: where the winner is slower than eager, what says so, and what serves there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact.description import describe
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import Session, judge
from freezer.freezing.packaging import assemble
from freezer.freezing.payload_sets.slow_sizes import nearest_sizes, with_captured
from freezer.spec import Dim
from tests.support.steps import (
    ANY_SPEED,
    HERE,
    QUICK,
    candidate_of,
    quickly,
    random_inputs,
    session_of,
    subject_of,
    target_of,
)

ONE = 1
"""Thread: other processes disturb it least."""

BATCH = Dim(name="batch", min=1, max=1024)
POLICY = replace(QUICK, min_rounds=3, block_ms=2.0, time_limit_s=1.0)
"""Three rounds give an interval."""


class SlowWhenTraced(nn.Module):
    """Many small operators in eager mode; a few in a trace, with work that grows with the square of
    the batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return (x + 40.0) + 0.0 * (x @ x.t()).sin().cos().sin().cos().sin().sum()
        for _ in range(40):
            x = x + 1.0
        return x


@pytest.fixture(scope="module")
def session() -> Session:
    subject = subject_of(SlowWhenTraced(), {"x": random_inputs(2, 16)}, {"x": {0: BATCH}})
    return session_of(subject, target_of(subject, "torchscript-frozen", ONE), policy=POLICY)


@pytest.fixture(scope="module")
def candidate(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    """Faster than eager at batch 1 and 32, slower at batch 1024."""
    folder = tmp_path_factory.mktemp("slow") / "c"
    return candidate_of(session.subject, "torchscript-frozen", folder)


def test_slower_sizes_are_reported(
    session: Session, candidate: Candidate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: Any = judge(session, [candidate])
    points, verdicts = found.winner.points, ["faster", "faster", "slower"]
    assert [item.point["batch"] for item in points] == [1, 32, 1024]
    assert [item.verdict for item in points] == verdicts
    place = f"{ONE} thread, batch 1024 ({points[2].speedup:.2f})"
    assert found.reason.endswith(f"; slower than eager with {place}")
    artifact = assemble(session, found, dest=tmp_path / "a", provenance={}, failures={})
    described = [text for name, text in describe(artifact.manifest) if name == "point"]
    assert [text.rpartition(", ")[2] for text in described] == verdicts
    freezer.load(artifact.folder)
    assert caplog.messages == [f"model for {HERE} was measured slower than eager with {place}"]


def test_captured_program_serves_where_it_is_faster(tmp_path: Path) -> None:
    model, given = SlowWhenTraced().eval(), {"x": random_inputs(2, 16)}
    options: dict[str, Any] = {"num_threads": ONE, "policy": POLICY}
    found: Any = quickly(model, given, tmp_path / "a", dims={"x": {0: BATCH}}, **options)
    assert found.reason.endswith("; the captured program serves batch from 182 to 1024"), (
        "sizes nearer to 1024 than to 32"
    )
    points = found.artifact.manifest.latency.points
    assert [(item.point["batch"], Path(item.payload).name) for item in points] == [
        *((1, "all.pt"), (32, "all.pt")),
        *((1024, "captured.pt2"), (1024, "all.pt")),
    ]
    verdicts = [points[index].verdict for index in (0, 1, 3)]
    assert verdicts == ["faster", "faster", "slower"]
    frozen = freezer.load(found.artifact.folder)
    served = [frozen.payload_for({"batch": size}).path for size in (1, 181, 182, 1024)]
    assert served == ["payloads/all.pt"] * 2 + ["payloads/captured.pt2"] * 2
    x = random_inputs(200, 16)
    torch.testing.assert_close(frozen(x), model(x))


def test_captured_program_is_left_out_with_a_reason(
    session: Session, candidate: Candidate, tmp_path: Path
) -> None:
    found = judge(session, [candidate])
    small = replace(session, limits=replace(ANY_SPEED, size_mb_max=0.001))
    stateful = replace(session, reference=replace(session.reference, stateful=True))
    for strict, reason in (
        (small, "size_mb_max is 0.001"),
        (stateful, "belong to one payload"),
    ):
        folder = tmp_path / reason
        folder.mkdir()
        unchanged: Any = with_captured(strict, found, folder)
        assert reason in unchanged.reason
        assert [reason in item.reason for item in unchanged.winner.dropped] == [True]
        assert unchanged.winner.candidate == candidate


DIMS = (BATCH, Dim(name="height", min=32, max=128, multiple_of=8))


@pytest.mark.parametrize(
    ("gains", "sizes"),
    [
        ([(32, 64), (1024, 128)], [(6, 1024), (48, 128)]),
        ([(32, 64)], [(6, 181), (48, 88)]),
    ],
)
def test_sizes_go_to_the_nearest_timed_place(
    gains: list[tuple[int, int]], sizes: list[tuple[int, int]]
) -> None:
    timed = [
        {"batch": 1, "height": 32},
        {"batch": 32, "height": 64},
        {"batch": 1024, "height": 128},
    ]
    found = nearest_sizes(
        DIMS, [{"batch": batch, "height": height} for batch, height in gains], timed
    )
    assert [(dim.min, dim.max) for dim in found] == sizes
