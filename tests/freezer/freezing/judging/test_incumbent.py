"""The artifact that serves now is timed beside a new one, which replaces it unless it is worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import MeasuredDrift, PreviousRecord
from freezer.freezing.candidates import Candidate, architecture_digest
from freezer.freezing.judging import Incumbent, Judgement, Trial, judge
from freezer.freezing.judging.incumbent import compare_with_incumbent
from freezer.freezing.models import Subject
from freezer.freezing.packaging import assemble
from freezer.freezing.target import target_here
from freezer.spec import FLOAT32, Limits
from freezer.timing import Speedup
from tests.support.models import seeded
from tests.support.steps import (
    ANY_SPEED,
    HERE,
    QUICK,
    candidate_of,
    random_inputs,
    rules,
    session_of,
    subject_of,
)

RECIPE = "torchscript-frozen"
SLOW = 100
"""Products that make the model several times as slow."""

TARGET = target_here(HERE, 1)
"""One thread: on a busy machine, threads that wait for each other would hide the products."""


ALLOWED = replace(ANY_SPEED, allow_regression=True)


class Laboring(nn.Module):
    """A layer after a number of products with the identity: the same answers, later."""

    def __init__(self, work: int = 0, bias: float = 0.0) -> None:
        super().__init__()
        self.work, self.layer = work, nn.Linear(16, 16)
        self.layer.bias.data += bias

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.work):
            x = x @ torch.eye(16)
        return torch.nn.functional.gelu(self.layer(x))


def subject(*options: Any, rows: int = 2) -> Subject:
    return subject_of(seeded(Laboring, *options), {"x": random_inputs(rows, 16)})


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    return candidate_of(subject(SLOW), RECIPE, tmp_path_factory.mktemp("slow") / "c", TARGET)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Incumbent:
    """The artifact of the model without extra work."""
    folder = tmp_path_factory.mktemp("published")
    session = session_of(subject(), TARGET)
    made = assemble(
        session,
        judge(session, [candidate_of(session.subject, RECIPE, folder / "c", TARGET)]),
        dest=folder / "a",
        provenance={"source": "here"},
        failures={},
    )
    return Incumbent(
        folder=made.folder, manifest=replace(made.manifest, version=3), digest="sha256:3"
    )


def judged(
    candidate: Candidate,
    incumbent: Incumbent | None = None,
    limits: Limits = ANY_SPEED,
    model: Subject | None = None,
) -> Judgement:
    return judge(session_of(model or subject(SLOW), TARGET, limits=limits), [candidate], incumbent)


def changed(incumbent: Incumbent, **changes: Any) -> Incumbent:
    return replace(incumbent, manifest=replace(incumbent.manifest, **changes))


@pytest.mark.parametrize(
    ("limits", "same_weights", "verdict", "says"),
    [
        (ANY_SPEED, True, "kept-previous", "; --allow-regression replaces it"),
        (ANY_SPEED, False, "published", "; replaced, since its weights differ"),
        (Limits(speedup_min=6.0), True, "kept-previous", "; eager is 0."),
        (ALLOWED, True, "published", "; allowed by --allow-regression"),
    ],
    ids=["slower", "new weights", "eager", "allowed"],
)
def test_slower_artifact_replaces_if_allowed(
    slow: Candidate,
    published: Incumbent,
    limits: Limits,
    same_weights: bool,
    verdict: str,
    says: str,
) -> None:
    weights = published.manifest.provenance["weights"] if same_weights else "sha256:other"
    found = judged(slow, changed(published, provenance={"weights": weights}), limits)
    assert (found.verdict, found.winner is None) == (verdict, verdict == "kept-previous")
    assert says in found.reason
    previous: Any = found.previous
    assert (previous.version, previous.same_weights, previous.problem) == (3, same_weights, None)
    assert previous.speedup_ci[1] < 0.9
    assert previous.error_ratio is not None
    assert same_weights or previous.error_ratio == published.manifest.drift.error_ratio


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (FLOAT32, "int8", "kept-previous"),
        ("int8", "int8", "published"),
        ("int8", FLOAT32, "published"),
    ],
)
def test_lower_precision_has_to_be_faster(
    slow: Candidate, before: str, after: str, verdict: str
) -> None:
    """Its error ratio is compared with none."""
    drift = mock.Mock(measured=MeasuredDrift(error_ratio=2e5))
    winner = Trial(candidate=replace(slow, precision=after), drift=drift)
    same, fast = (Speedup(value=value, low=0.9 * value, high=1.1 * value) for value in (1.0, 2.0))
    record = PreviousRecord(
        version=3,
        artifact="sha256:3",
        recipe=RECIPE,
        torch="2.13.0",
        same_weights=True,
        error_ratio=1.2,
    )
    judgement = Judgement(
        trials=(winner,),
        verdict="published",
        winner=winner,
        cells=(mock.Mock(faster=lambda *_: same),),
        previous=record,
        old=Trial(candidate=replace(slow, precision=before), speedup=fast),
    )
    found = compare_with_incumbent(rules(), judgement)
    assert found.verdict == verdict
    assert (verdict == "kept-previous") == ("int8 instead of float32" in found.reason)


def test_disturbed_judge_inherits_the_earlier_speed(
    slow: Candidate, published: Incumbent, tmp_path: Path
) -> None:
    """The speed belongs to the architecture; of another one it is not inherited."""
    target = target_here(HERE, 2)  # with one thread, CPU time would decide
    session = session_of(subject(SLOW), target, policy=replace(QUICK, busy_limit=-1e9))
    own: Any = published.manifest.latency
    figures = {"speedup": 2.0, "speedup_ci": (1.9, 2.1), "clock": "wall"}
    speed = replace(own, num_threads=2, **figures)

    def found(architecture: str) -> Judgement:
        origin = {"weights": "sha256:other", "architecture": architecture}
        return judge(session, [slow], changed(published, provenance=origin, latency=speed))

    other = found("another")
    assert (other.verdict, other.winner) == ("unstable", None)
    inheriting = found(architecture_digest(session.subject, session.target))
    assert inheriting.verdict == "unstable"
    made = assemble(session, inheriting, dest=tmp_path / "a", provenance={}, failures={})
    latency: Any = made.manifest.latency
    assert (made.manifest.verdict, latency.inherited, latency.speedup) == ("unstable", 3, 2)
    (trial,) = inheriting.trials
    assert inheriting.winner is not None
    assert latency.cold_start == inheriting.winner.cold_start is not None, "measured anew"
    assert made.manifest.drift.error_ratio == trial.measured.drift.error_ratio


def test_faster_artifact_replaces(slow: Candidate, published: Incumbent, tmp_path: Path) -> None:
    fast = candidate_of(subject(), RECIPE, tmp_path / "fast", TARGET)
    incumbent = replace(changed(published, payloads=slow.payloads), folder=slow.folder)
    found: Any = judged(fast, incumbent, model=subject())
    assert found.verdict == "published"
    assert found.previous.speedup > 1.1


def test_payload_of_a_candidate_competes_once(slow: Candidate, published: Incumbent) -> None:
    same = replace(changed(published, payloads=slow.payloads), folder=slow.folder)
    found: Any = judged(slow, same)
    assert (found.verdict, found.previous) == ("published", None)
    assert sorted(found.sampling.samples_ms) == ["eager", RECIPE]


def test_artifact_that_cannot_be_compared_is_replaced(
    slow: Candidate, published: Incumbent, tmp_path: Path
) -> None:
    drifting = candidate_of(subject(0, 1.0), RECIPE, tmp_path / "drifting", TARGET)
    refused = "canary: this machine computes different results"
    for incumbent, problem in (
        (replace(published, problem=refused), refused),
        (changed(published, inputs=subject(rows=3).spec), "its inputs or outputs differ"),
        (replace(published, folder=drifting.folder), "it does not pass today's drift gate: "),
    ):
        found: Any = judged(slow, incumbent)
        assert found.verdict == "published", problem
        assert problem in str(found.previous.problem)


def test_artifact_beyond_a_new_limit_is_replaced(slow: Candidate, published: Incumbent) -> None:
    size_mb = (slow.size_bytes + published.manifest.payloads[0].size_bytes) / 2e6
    heavy = replace(published.manifest.payloads[0], size_bytes=int(1e9))
    found = judged(
        slow, changed(published, payloads=(heavy,)), replace(ANY_SPEED, size_mb_max=1.0 + size_mb)
    )
    assert found.verdict == "published"
    assert "; that no longer qualifies: 1000.0 MB; size_mb_max is " in found.reason
