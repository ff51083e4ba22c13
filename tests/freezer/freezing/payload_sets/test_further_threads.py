"""Further thread counts: what is built and kept of the winner, and what stays if that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import BuildError
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import Judgement, Session, judge
from freezer.freezing.payload_sets.other_payloads import judge_further, with_further_threads
from freezer.freezing.target import target_here
from freezer.hardware import counts_within
from tests.support.models import mlp
from tests.support.steps import (
    BATCH,
    HERE,
    artifact_of,
    candidate_of,
    quickly,
    random_inputs,
    session_of,
    subject_of,
)

TARGET = target_here(HERE, (2, 1))


@pytest.mark.parametrize(
    ("cpus", "expected"), [(1, (1,)), (2, (2, 1)), (6, (6, 4, 2, 1)), (8, (8, 4, 2, 1))]
)
def test_default_counts(cpus: int, expected: tuple[int, ...]) -> None:
    assert counts_within(cpus) == expected


@pytest.fixture(scope="module")
def session() -> Session:
    return session_of(subject_of(mlp(), {"x": random_inputs(2, 4)}, {"x": {0: BATCH}}), TARGET)


def judged(session: Session, folder: Path) -> Judgement:
    """The judgement of a candidate for 2 threads; TorchScript stands for a library, which takes
    seconds to build.
    """
    candidate = candidate_of(
        session.subject, "torchscript-frozen", folder / "candidate", TARGET.at(2)
    )
    payloads = tuple(replace(payload, num_threads=2) for payload in candidate.payloads)
    return judge(session, [replace(candidate, payloads=payloads)])


def with_payload(judgement: Judgement, content: bytes | None = None) -> Candidate:
    """The winner with a payload for 1 thread: a copy of the one for 2, or a file of this
    content.
    """
    assert judgement.winner is not None, judgement.reason
    candidate = judgement.winner.candidate
    (payload,) = candidate.payloads
    data = (candidate.folder / payload.path).read_bytes() if content is None else content
    (candidate.folder / "payloads" / "one.pt").write_bytes(data)
    return replace(
        candidate, payloads=(payload, replace(payload, path="payloads/one.pt", num_threads=1))
    )


def test_payload_for_a_further_count_is_kept(session: Session, tmp_path: Path) -> None:
    judgement: Any = judged(session, tmp_path)
    found: Any = judge_further(session, judgement, with_payload(judgement))
    assert found.winner is found.best is found.trials[0]
    places = {(row.num_threads, row.payload) for row in found.winner.points}
    assert places == {(2, "payloads/all.pt"), (1, "payloads/one.pt")}
    assert {row.num_threads for row in found.winner.drift.rows} == {2, 1}
    assert (found.verdict, found.winner.speedup) == (judgement.verdict, judgement.winner.speedup)


def test_wrong_payload_for_a_further_count_is_dropped(session: Session, tmp_path: Path) -> None:
    """It is of a model with another bias; the verdict stays."""
    judgement, changed = judged(session, tmp_path), mlp()
    changed.last.bias.data += 1.0  # type: ignore[operator,union-attr]
    other = subject_of(changed, {"x": random_inputs(2, 4)}, {"x": {0: BATCH}})
    wrong = candidate_of(other, "torchscript-frozen", tmp_path / "wrong")
    content = (wrong.folder / wrong.payloads[0].path).read_bytes()
    found: Any = judge_further(session, judgement, with_payload(judgement, content))
    assert found.verdict == "published"
    (payload,), (dropped,) = found.winner.candidate.payloads, found.winner.dropped
    assert (payload.path, dropped.payload) == ("payloads/all.pt", "payloads/one.pt")
    assert dropped.num_threads == 1
    assert "error_ratio" in dropped.reason or "rmse" in dropped.reason, dropped.reason


def test_failed_build_leaves_the_winner(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> Candidate:
        raise BuildError("inductor: no room")

    monkeypatch.setattr("freezer.freezing.payload_sets.other_payloads.build_further", fails)
    judgement = judged(session, tmp_path)
    found: Any = with_further_threads(session, judgement, tmp_path)
    assert (found.verdict, found.cells) == ("published", judgement.cells)
    (dropped,) = found.winner.dropped
    assert (dropped.num_threads, dropped.reason) == (1, "inductor: no room")


def test_torchscript_is_timed_with_every_default_count(tmp_path: Path) -> None:
    given = {"x": random_inputs(2, 4)}, tmp_path / "out"
    manifest = artifact_of(quickly(mlp(), *given, num_threads=None)).manifest
    assert manifest.latency is not None
    timed = tuple(dict.fromkeys(row.num_threads for row in manifest.latency.points))
    assert timed == counts_within(timed[0])
    assert [payload.num_threads for payload in manifest.payloads] == [None]
