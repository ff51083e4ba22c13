"""Finalists are timed again in a second process where that can change the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freezer.errors import JudgeError
from freezer.freezing.judging import Judgement, Trial
from freezer.freezing.judging import finalists as module
from freezer.freezing.judging.cold_start import ASKS, ask_fresh_process
from freezer.freezing.judging.finalists import finalists, time_again
from freezer.freezing.judging.judgement import again
from freezer.freezing.judging.verdicts import decide
from freezer.freezing.models import Subject
from freezer.freezing.recipes import EAGER
from freezer.freezing.sources import find_function
from freezer.freezing.target import target_here
from freezer.spec import Limits
from freezer.timing import Sampling, Speedup, over_processes
from tests.support.judgements import judgement, trial
from tests.support.models import Calling, mlp, scripted_module
from tests.support.steps import HERE, candidate_of, judgement_of, random_inputs, rules, subject_of

RECIPE = "torchscript-frozen"
NEVER_NEAR = Limits(speedup_min=1e-3)


def timed(recipe: str, value: float, **changes: Any) -> Trial:
    """A trial with an interval of 1% to each side."""
    plain = trial(recipe, speedup=value, size_mb=1, load_ms=1, memory_mb=1, **changes)
    return replace(plain, speedup=Speedup(value=value, low=value * 0.99, high=value * 1.01))


def names(found: Judgement, **rule: Any) -> list[str]:
    session = rules(**{"target": target_here(HERE, 1), **rule})
    return [each.recipe for each in finalists(session, found)]


def with_sampling(found: Judgement, **changes: Any) -> Judgement:
    cell = found.cells[0]
    return replace(found, cells=(replace(cell, sampling=replace(cell.sampling, **changes)),))


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([1.08, 1.0], 2),
        ([1.04, 1.03], 2),
        ([1.5, 1.45, 1.48], 2),
        ([1.5, 1.3], 0),
        ([1.2], 0),
        ([0.98, 0.97], 0),
    ],
    ids=["above", "below", "runner-up", "winner", "alone", "slow"],
)
def test_finalists_are_timed_where_it_matters(speedups: list[float], expected: int) -> None:
    found = names(judgement(*[timed(f"recipe {value}", value) for value in speedups]))
    best = sorted(speedups, reverse=True)[:expected]
    assert found == [f"recipe {value}" for value in best]


def test_close_incumbent_is_timed_again() -> None:
    clear = judgement(timed("fast", 2.0))
    close = replace(clear, old=timed("previous", 2.04))
    assert names(clear) == []
    assert names(close) == ["fast", "previous"]
    assert names(close, limits=Limits(allow_regression=True)) == []
    assert names(replace(clear, old=timed("previous", 1.5))) == []


def test_second_process_needs_a_valid_first() -> None:
    close = judgement(timed("one", 1.5), timed("two", 1.49))
    assert names(close)
    assert names(with_sampling(close, stable=False)) == []
    assert names(with_sampling(close, clock="disturbed")) == []
    assert names(close, on_drift_alone=True) == []
    assert names(close, limits=Limits(size_mb_max=0.5)) == []
    on_gpu = replace(target_here(HERE, 1), device=torch.device("cuda", 0))
    assert names(close, target=on_gpu) == []
    assert names(replace(close, cells=(), trials=())) == []


def test_intervals_contain_the_difference_between_processes() -> None:
    """Simulated judges whose processes differ by 2%, with blocks that differ little."""
    errors = 0.02 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    covered = [0, 0]
    for pair in errors.exp().tolist():
        first, second = (Speedup(value=x, low=x * 0.999, high=x * 1.001) for x in pair)
        for place, faster in enumerate((first, over_processes(first, second))):
            covered[place] += faster.low <= 1 <= faster.high
    assert covered[0] < 0.06 * 2000
    assert covered[1] > 0.94 * 2000
    apart = over_processes(
        Speedup(value=1.0, low=0.99, high=1.01), Speedup(value=1.2, low=1.19, high=1.21)
    )
    assert apart.low < 0.99
    assert apart.high > 1.21


def winner_after(monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> Judgement:
    """The verdict if the second process measures these latencies, where `a` was ahead."""
    a, b = timed("a", 2.0), timed("b", 1.96)
    first = judgement(a, b, eager=20.0, a=10.0, b=10.2)
    samples_ms = {name: [[ms] * 20] * 20 for name, ms in milliseconds.items()}
    second = Sampling(samples_ms=samples_ms, num_dropped=0, settled=True, stable=True)
    monkeypatch.setattr(module, "_in_second_process", lambda *_: second)
    session = rules(target=target_here(HERE, 1))
    return decide(session, time_again(session, first))


def test_both_processes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = winner_after(monkeypatch, eager=20.0, a=10.5, b=10.0)
    assert found.winner.recipe == "b"
    assert found.winner.speedup.value == pytest.approx((2.0 * 20 / 10.2) ** 0.5, rel=1e-3)
    assert found.eager_ms["p50"] == 20.0
    assert winner_after(monkeypatch, eager=20.0, a=40.0, b=40.0).verdict == "kept-eager"


def near_anything(subject: Subject, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Judgement:
    """A judgement that any process might change."""
    monkeypatch.setattr(module, "NEAR", 1e6)
    return judgement_of(subject, [candidate_of(subject, RECIPE, folder / "c")], NEVER_NEAR)


def test_second_process_times_eager_and_the_finalists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(scripted_module(mlp()), {"x": random_inputs(2, 4)})
    found = near_anything(subject, tmp_path, monkeypatch)
    assert found.verdict == "published", found.reason
    assert "; timed in two processes" in found.reason
    assert found.sampling is not None
    samples_ms = found.sampling.samples_ms
    assert list(samples_ms) == [EAGER, RECIPE, again(EAGER), again(RECIPE)]
    assert all(map(len, samples_ms.values()))


def test_second_process_finds_a_catalogs_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from torch import nn
print("loaded", end="")
class Own(nn.Module):
    def forward(self, x):
        return x * 2
"""
    (tmp_path / "own_models.py").write_text(code)
    model = find_function("own_models:Own", [str(tmp_path)])()
    found = near_anything(subject_of(model, {"x": random_inputs(2, 4)}), tmp_path, monkeypatch)
    assert "; timed in two processes" in found.reason


PROGRAM = """
import pathlib, sys, time
here = pathlib.Path(sys.stdin.readline().strip('"\\n'))
(here / "prepared").touch()
print("no newline", end="")
print("\\n" + {asks!r}, flush=True)
sys.stdin.readline()
time.sleep({sleep_s})
print(int((here / "alone").exists()))
"""


def answer_of(folder: Path, timeout_s: float, **changes: Any) -> Any:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(**{"asks": ASKS, "sleep_s": 0, **changes}))
    return ask_fresh_process(str(program), str(folder), "count", timeout_s)


def test_fresh_process_prepares_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def turn() -> Iterator[None]:
        assert (tmp_path / "prepared").exists()
        (tmp_path / "alone").touch()
        yield
        (tmp_path / "alone").rename(tmp_path / "done")

    monkeypatch.setattr("freezer.timing.sharing._alone", [turn])
    assert answer_of(tmp_path, 60) == 1
    assert (tmp_path / "done").exists()


def test_fresh_process_that_hangs_or_fails_ends(tmp_path: Path) -> None:
    with pytest.raises(JudgeError):
        answer_of(tmp_path, 2, sleep_s=60)
    with pytest.raises(JudgeError):
        answer_of(tmp_path, 60, sleep_s="missing")


def test_model_that_cannot_be_pickled_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = subject_of(Calling(lambda x: x * 2), {"x": random_inputs(2, 4)})
    found = near_anything(subject, tmp_path, monkeypatch)
    assert found.verdict == "published"
    assert "; timed in one process only" in found.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert found.sampling is not None
    assert list(found.sampling.samples_ms) == [EAGER, RECIPE]
