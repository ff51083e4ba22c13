"""Judge: baked-in state, lost branches, limits and verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freezer.artifact.description import describe
from freezer.errors import JudgeError
from freezer.freezing.candidates import Candidate
from freezer.freezing.judging import Incumbent, confirm_inherited, judge
from freezer.freezing.judging import session as session_module
from freezer.freezing.judging.steps import quality_of
from freezer.freezing.models import Subject, weights_digest
from freezer.freezing.packaging import assemble
from freezer.freezing.payload_sets import with_other_payloads
from freezer.freezing.recipes import EAGER
from freezer.freezing.target import target_here
from freezer.hardware import this_host
from freezer.spec import Dim, Limits
from freezer.timing import Speedup
from tests.support.models import (
    BakedCounter,
    Counter,
    Masking,
    Mlp,
    mlp,
    seeded,
)
from tests.support.steps import (
    ANY_SPEED,
    BATCH,
    HERE,
    QUICK,
    candidate_of,
    judgement_of,
    random_inputs,
    session_of,
    subject_of,
)

X = random_inputs(2, 4)


@pytest.fixture(scope="module")
def mlp_candidate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Candidate]:
    """A torchscript-frozen candidate; read it, never write it."""
    subject = subject_of(mlp(), {"x": X})
    return subject, candidate_of(
        subject, "torchscript-frozen", tmp_path_factory.mktemp("mlp") / "c"
    )


def test_baked_in_counter_fails_in_the_sequence(tmp_path: Path) -> None:
    """Every single call is right."""
    subject = subject_of(seeded(Counter), {"x": X})
    wrong = subject_of(seeded(BakedCounter), {"x": X})
    baked = candidate_of(wrong, "torchscript-frozen", tmp_path / "baked")
    found: Any = judgement_of(subject, [baked])
    assert (found.verdict, "(sequence)" in found.reason) == ("rejected", True)
    rows = found.trials[0].drift.rows
    assert {row.kind for row in rows if row.problem} == {"sequence"}


def test_mask_of_the_first_row_is_rejected(tmp_path: Path) -> None:
    """At the largest sizes, too: a candidate may take another path there."""
    inputs = {"x": random_inputs(4, 8), "mask": torch.ones(4, 8)}
    dims = {0: BATCH, 1: Dim(name="seq", min=4, max=8)}
    subject = subject_of(Masking(), inputs, dict.fromkeys(inputs, dims))
    wrong = candidate_of(replace(subject, model=Masking(rows=1)), "portable", tmp_path / "c")
    found: Any = judgement_of(subject, [wrong])
    assert found.verdict == "rejected"
    problems = [row for row in found.trials[0].drift.rows if row.problem]
    assert {"batch": 4, "seq": 8} in [subject.sets[row.set_index].point for row in problems]


def test_candidates_compete_with_eager(tmp_path: Path) -> None:
    changed, dims = seeded(Mlp), {"x": {0: BATCH}}
    changed.last.bias.data += 1.0  # type: ignore[operator,union-attr]
    subject, other = (subject_of(model, {"x": X}, dims) for model in (mlp(), changed))
    right = candidate_of(subject, "torchscript-frozen", tmp_path / "right")
    wrong = candidate_of(other, "torchscript-frozen", tmp_path / "wrong")
    wrong = replace(wrong, recipe="wrong", weights=right.weights)
    found: Any = judgement_of(subject, [right, wrong])
    assert (found.verdict, found.winner.recipe) == ("published", right.recipe)
    assert sorted(found.sampling.samples_ms) == ["eager", "torchscript-frozen"]
    assert [trial.problem is None for trial in found.trials] == [True, False]


def test_payload_that_does_not_open_is_rejected(tmp_path: Path) -> None:
    subject = subject_of(mlp(), {"x": X})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "c")
    (candidate.folder / candidate.payloads[0].path).write_bytes(b"no zip")
    found = judgement_of(subject, [candidate])
    assert found.verdict == "rejected"
    assert "torchscript-frozen: RuntimeError" in found.reason


def test_candidates_of_other_weights_are_refused(mlp_candidate: tuple[Subject, Candidate]) -> None:
    with pytest.raises(JudgeError) as caught:
        judgement_of(subject_of(mlp(9), {"x": X}), [mlp_candidate[1]])
    assert caught.value.code == "CP-WEIGHTS-DIFFER"


def test_accepted_noise_publishes_by_the_lower_bound(
    mlp_candidate: tuple[Subject, Candidate], tmp_path: Path
) -> None:
    subject, candidate = mlp_candidate
    noise = replace(QUICK, busy_limit=-1e9, accept_noise=True)
    session = session_of(subject, target_here(HERE, 2), policy=noise)
    found = judge(session, [candidate])
    assert found.verdict == "published"
    assert "; by disturbed rounds, since other processes used" in found.reason
    made = assemble(session, found, dest=tmp_path / "a", provenance={}, failures={})
    latency: Any = made.manifest.latency
    assert (latency.clock, latency.points[0].clock) == ("disturbed", "disturbed")
    assert latency.speedup_ci is not None
    assert latency.num_dropped_rounds == len(found.cells[0].sampling.samples_ms[EAGER])
    hidden = judge(replace(session, limits=Limits(speedup_min=1e6)), [candidate])
    assert (hidden.verdict, hidden.winner) == ("unstable", None), (
        "noise does not replace what serves by the portable program"
    )


@pytest.mark.parametrize(
    ("found", "number"), [(torch.tensor([0.5]), 0.5), (np.float32(0.5), 0.5), (float("nan"), None)]
)
def test_task_metric_is_stored_as_a_plain_number(found: Any, number: float | None) -> None:
    kept = quality_of(lambda _: found, lambda: None)
    assert (kept, type(kept)) == (number, type(number))


def test_stateful_candidate_is_published_with_its_task_metric(tmp_path: Path) -> None:
    def metric(model: Callable[..., Any]) -> float:
        return float(model(x=torch.zeros(2, 4)).mean())

    model = seeded(Counter)
    before, subject = weights_digest(model), subject_of(model, {"x": X})
    found = judgement_of(
        subject, [candidate_of(subject, "torchscript-frozen", tmp_path / "c")], task_metric=metric
    )
    assert found.verdict == "published"
    assert (found.task_metric, found.trials[0].task_metric) == (
        1.0,
        1.0,
    ), "the metric starts from the initial state"
    assert weights_digest(model) == before


def test_memory_is_measured_in_a_fresh_process_if_limited(
    mlp_candidate: tuple[Subject, Candidate],
) -> None:
    subject, candidate = mlp_candidate
    found = judgement_of(subject, [candidate], Limits(speedup_min=0.0, memory_mb_max=1e-3))
    assert found.verdict == "kept-eager"
    assert re.search(
        r"torchscript-frozen: \d+\.\d MB of memory; memory_mb_max is 0.001", found.reason
    )
    (tradeoff,) = found.pareto
    assert tradeoff.memory_mb is not None
    assert tradeoff.memory_mb > 0.1


def test_candidate_that_no_fresh_process_can_call_is_rejected(
    mlp_candidate: tuple[Subject, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, candidate = mlp_candidate
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.syspath_prepend(tmp_path)  # for the fresh process alone: torch is imported here
    found = judgement_of(subject, [candidate], Limits(memory_mb_max=1e6))
    assert found.verdict == "rejected"
    assert "could not open and call all.pt: ImportError: no torch here" in found.reason


def test_an_emulated_cpu_is_judged_without_timing(
    mlp_candidate: tuple[Subject, Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, candidate = mlp_candidate
    monkeypatch.setattr(session_module, "this_host", lambda: replace(this_host(), emulated=True))
    target = replace(target_here(HERE, 2), further_threads=(1,))
    session = session_of(subject, target, limits=Limits(speedup_min=1e6, memory_mb_max=1))
    found: Any = with_other_payloads(session, judge(session, [candidate]), tmp_path)
    assert (found.verdict, len(found.cells)) == ("published", 0)
    assert (found.winner.speedup, found.winner.cold_start) == (None, None)
    manifest = assemble(session, found, dest=tmp_path / "a", provenance={}, failures={}).manifest
    assert manifest.latency is None
    assert dict(describe(manifest))["speed"] == "speed not measured"
    large = replace(session, limits=Limits(size_mb_max=1e-6))
    assert judge(large, [candidate]).verdict == "kept-eager"


def test_an_emulated_cpu_inherits_an_earlier_speed(
    mlp_candidate: tuple[Subject, Candidate], tmp_path: Path
) -> None:
    subject, candidate = mlp_candidate
    session = session_of(subject, target_here(HERE, 2), limits=ANY_SPEED)
    measured = judge(session, [candidate])
    artifact = assemble(session, measured, dest=tmp_path / "a", provenance={}, failures={})
    incumbent = Incumbent(
        folder=artifact.folder, manifest=replace(artifact.manifest, version=3), digest="sha256:0"
    )
    found: Any = judge(replace(session, timed=False), [candidate], incumbent)
    assert (found.verdict, found.inherited.inherited) == ("published", 3)
    same = Speedup(value=0.01, low=0.01, high=0.01, clock="inherited")
    more = replace(same, value=1e6, low=1e6, high=1e6)
    for speedup, holds in ((same, True), (more, False)):
        winner = replace(found.winner, speedup=speedup)
        confirmed, why = confirm_inherited(session, replace(found, winner=winner))
        assert (not why, confirmed.reason != found.reason) == (holds, holds)
