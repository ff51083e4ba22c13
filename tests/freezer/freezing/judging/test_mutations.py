"""Right and wrong rewrites of operators: what the judge takes for what."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutated_models import ARCHITECTURES
from tests.support.mutations import Mutation, judged, mutations

SMALL = "moves answers by less than 1e-5 of the rms, which the gate allows"
EQUAL = "changes no answer of the inputs that are tried beyond rounding"
ROUGH = "is wrong at extremes alone, by less than 1e-3 of the rms"

EXPLAINED = {
    "attentive: linear: weights off by 1e 4": SMALL,
    "attentive: linear_1: weights off by 1e 4": SMALL,
    "recurrent: linear: weights off by 1e 4": SMALL,
    "attentive: linear_1: one bias lost": EQUAL,  # of all keys alike
    "convolutional: relu: small values lost": EQUAL,  # the largest of four pixels
    "listening: elu: exp minus 1": EQUAL,  # of normalized values
    "listening: linear_1: clipped at 1": EQUAL,  # of a mean of tanh
    "recurrent: linear_6: clipped at 1": EQUAL,  # of a mean of tanh
    "segmenting: elu: exp minus 1": EQUAL,  # of normalized values
    "detecting: softmax: small shares lost": ROUGH,
    "tabular: softmax: small shares lost": ROUGH,
}
"""Wrong rewrites that the judge accepts, and why (docs/reference/measuring.md)."""


def mistakes(name: str, folder: Path, step: int = 1, start: int = 0) -> list[str]:
    """What the judge takes for the other kind, of every so many rewrites of an architecture."""
    chosen = [item for item in mutations() if item.architecture == name][start::step]
    trials = judged(ARCHITECTURES[name], chosen, folder)
    return [
        f"{item}: {trial.problem or 'accepted'}"
        for item, trial in zip(chosen, trials, strict=True)
        if item.rewrite.wrong == (trial.problem is None) and not is_explained(item)
    ]


def is_explained(item: Mutation) -> bool:
    return item.rewrite.wrong and str(item) in EXPLAINED


def test_some_rewrites_are_told_apart(tmp_path: Path) -> None:
    assert mistakes("convolutional", tmp_path, step=11, start=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_rewrites_are_told_apart(name: str, tmp_path: Path) -> None:
    assert mistakes(name, tmp_path) == []
