"""Consent to lower precision: what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from freezer.errors import SpecError
from freezer.spec import check_consent, declared_accuracy


@pytest.mark.parametrize(
    ("precision", "given"),
    [
        (["int4"], {"samples": "a.npz", "cosine_min": 0.9}),
        (["int8"], None),
        (["int8"], {"samples": "a.npz"}),
        (["int8"], {"sqnr_db_min": 20.0}),
        (["bf16"], {"cosine_min": 0.99}),
        (["bf16", "int8"], {"sqnr_db_min": 20.0}),
        (["bf16"], {"samples": "a.npz", "metric": "m:f"}),
        (["bf16"], {"samples": "a.npz", "metric_drop_max": 0.01}),
        (["bf16"], {"samples": "a.npz", "sqnr_db_min": 20.0, "labels": "y"}),
        ([], {"sqnr_db_min": 20.0}),
    ],
)
def test_consent_without_a_budget_is_refused(
    precision: Sequence[str], given: dict[str, Any] | None
) -> None:
    accuracy = None if given is None else declared_accuracy(given)
    with pytest.raises(SpecError) as refused:
        check_consent(precision, accuracy)
    assert refused.value.code == "CP-ACCURACY"


def test_what_can_be_judged_is_accepted() -> None:
    check_consent([], None)
    check_consent(["bf16"], declared_accuracy({"sqnr_db_min": 30}))
    check_consent(["int8"], declared_accuracy({"samples": "a.npz", "top1_agreement_min": 0.99}))


@pytest.mark.parametrize(
    "given",
    [
        {"top1": 0.9},
        {"cosine_min": 1.0},
        {"sqnr_db_min": True},
        {"metric_drop_max": -1},
        {"samples": 3},
        {"metric": "f", "metric_drop_max": 0.1},
    ],
)
def test_bad_budgets_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        declared_accuracy(given)
    assert refused.value.code == "CP-ACCURACY"
