"""Sizes: where the winner is slower than eager, what says so, and what serves there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import freezer
from freezer.artifact.describe import describe
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.models.subject import Subject
from freezer.freezing.packaging.assemble import assemble
from freezer.freezing.validation.judge import Judgement, judge
from freezer.spec.inputs import Dim
from tests.models import Calling
from tests.steps import ANY_SPEED, HERE, QUICK, candidate_of, random_inputs, subject_of, target_of

THREADS = torch.get_num_threads()

BATCH = Dim(name="batch", min=1, max=512)
POLICY = replace(QUICK, min_rounds=3, block_ms=2.0, time_limit_s=1.0)
"""Three rounds give an interval."""


def plain(x: Tensor) -> Tensor:
    for _ in range(40):
        x = x + 1.0
    return x


def slow_at_large_batches(x: Tensor) -> Tensor:
    """Equal to `plain`, with fewer operators; the extra work grows with the square of the batch."""
    products = x.repeat(1, 8) @ x.repeat(1, 8).t()
    return (x + 40.0) + 0.0 * products.sin().cos().sin().sum()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(Calling(plain), {"x": random_inputs(2, 16)}, {"x": {0: BATCH}})


@pytest.fixture(scope="module")
def candidate(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    """Faster than eager at batch 1 and 22, slower at batch 512."""
    slow = replace(subject, model=Calling(slow_at_large_batches))
    return candidate_of(slow, "torchscript-frozen", tmp_path_factory.mktemp("slow") / "c")


def judged(subject: Subject, candidate: Candidate, **changes: Any) -> Judgement:
    target = target_of(subject, "torchscript-frozen", torch.get_num_threads())
    return judge(subject, [candidate], target, limits=ANY_SPEED, policy=replace(POLICY, **changes))


def test_slower_sizes_are_reported(
    subject: Subject, candidate: Candidate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = judged(subject, candidate)
    assert found.winner is not None
    assert [(item.point["batch"], item.verdict) for item in found.winner.points] == [(1, "faster"), (22, "faster"), (512, "slower")]
    place = f"{THREADS} threads, batch 512 ({found.winner.points[2].speedup:.2f})"
    assert found.reason.endswith(f"; slower than eager with {place}")
    target = target_of(subject, "torchscript-frozen", THREADS)
    artifact = assemble(subject, found, target, dest=tmp_path / "a", provenance={}, failures={})
    assert [text.rpartition(", ")[2] for name, text in describe(artifact.manifest) if name == "point"] == [
        "faster",
        "faster",
        "slower",
    ]
    freezer.load(artifact.folder)
    assert [record.getMessage() for record in caplog.records] == [f"model for {HERE} was measured slower than eager with {place}"]


def test_slow_size_is_not_measured(subject: Subject, candidate: Candidate) -> None:
    found = judged(subject, candidate, time_limit_s=1e-4)
    assert found.winner is not None
    assert [(item.verdict, item.eager_p50) for item in found.winner.points[1:]] == [("not measured", None)] * 2
