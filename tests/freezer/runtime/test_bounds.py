"""One-sided bounds, and the decision by a budget."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from freezer.compare import Values
from freezer.runtime.accuracy import (
    judge_accuracy,
    least_mean,
    least_share,
    measures,
    most_drop,
    samples_needed,
)


@pytest.mark.parametrize(("differ", "num"), [(0, 299), (1, 50), (3, 400), (50, 100)])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_share_bound_is_clopper_pearson(differ: int, num: int, alpha: float) -> None:
    expected = stats.beta.ppf(alpha, num - differ, differ + 1)
    assert least_share(differ, num, alpha) == pytest.approx(expected, abs=1e-9)


def test_samples_needed_without_flips() -> None:
    assert samples_needed(0.0, 0.99, 0.05) == 299
    assert samples_needed(0.0, 0.99, 0.05 / 3) == 408
    assert samples_needed(0.005, 0.99, 0.05) > 299


@pytest.mark.parametrize("num", [8, 20, 300])
def test_mean_bound_is_students(num: int) -> None:
    values = np.random.default_rng(0).normal(30, 2, num)
    t = stats.t.ppf(0.95, num - 1)
    expected = values.mean() - t * values.std(ddof=1) / num**0.5
    assert least_mean(values, 0.05) == pytest.approx(expected, abs=0.02)


def test_few_samples_bound_nothing() -> None:
    assert least_mean(np.full(7, 30.0), 0.05) == -np.inf
    assert judge_accuracy({"sqnr_db": [40.0] * 7}, {"sqnr_db_min": 20.0}, 1).problem


def test_equal_answers_bound_no_drop_of_zero() -> None:
    assert most_drop(np.zeros(20), 0.05, 1.0) == pytest.approx(1 - 0.05 ** (1 / 20))


@pytest.mark.parametrize(
    ("samples", "budget"),
    [
        ({"top1_agreement": [1.0] * 200}, {"top1_agreement_min": 0.99}),
        ({"top1_agreement": [1.0] * 290 + [0.0] * 10}, {"top1_agreement_min": 0.99}),
        ({"metric": [0.0] * 20}, {"metric_drop_max": 0.01}),
        ({"metric": [0.05] * 500}, {"metric_drop_max": 0.01}),
        ({"sqnr_db": [19.0, 21.0] * 50}, {"sqnr_db_min": 20.0}),
        ({"cosine": [0.99] * 100}, {"cosine_min": 0.995}),
    ],
)
def test_what_is_not_sure_breaks_the_budget(
    samples: dict[str, list[float]], budget: dict[str, float]
) -> None:
    assert judge_accuracy(samples, budget, 1).problem is not None


def test_reason_names_the_samples_needed() -> None:
    few = judge_accuracy({"top1_agreement": [1.0] * 200}, {"top1_agreement_min": 0.99}, 1)
    assert "299" in str(few.problem)
    enough = judge_accuracy({"top1_agreement": [1.0] * 299}, {"top1_agreement_min": 0.99}, 1)
    assert enough.problem is None
    shared = judge_accuracy({"top1_agreement": [1.0] * 299}, {"top1_agreement_min": 0.99}, 3)
    assert "408" in str(shared.problem)


def test_nan_is_the_worst_answer() -> None:
    right = Values(array=np.array([[1.0, 2.0]], np.float32), dtype="float32")
    wrong = Values(array=np.array([[np.nan, 2.0]], np.float32), dtype="float32")
    names = ("top1_agreement", "sqnr_db", "cosine")
    assert set(measures([right], [wrong], names).values()) == {0.0}
    assert measures([right], [right], names) == {
        "top1_agreement": 1.0,
        "sqnr_db": 150.0,
        "cosine": pytest.approx(1.0),
    }
