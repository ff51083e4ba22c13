"""Comparison of campaigns, history of a model, and the commands that print them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import AccuracyRecord
from freezer.spec import FLOAT32
from freezer.store import Store
from jobs import results
from pipeline.records import Outcome, summarize, verdict_text
from pipeline.reporting import compare
from pipeline.reporting.comparison import served_speed
from tests.support.commands import invoked
from tests.support.past_campaigns import failed, kept_eager, published, write_campaign

OLD = published("m", speedup=1.8)

CHANGES = {
    "unchanged": published("m", speedup=1.75, key="2"),  # within noise
    "slower": published("m", speedup=1.5, key="2"),
    "faster": published("m", speedup=2.2, key="2"),
    "drifted": published("m", speedup=1.8, error_ratio=2.9, key="2"),
    "newly failing": failed("m", key="2"),
}


@pytest.mark.parametrize(("kind", "after"), CHANGES.items(), ids=list(CHANGES))
def test_kinds_of_change(kind: str, after: Outcome) -> None:
    (change,) = compare([OLD], [after])
    assert change.kind == kind
    assert change.is_regression == (kind in {"slower", "drifted", "newly failing"})


def with_precision(precision: str, key: str, error_ratio: float) -> Outcome:
    """An outcome whose winner computes in a precision."""
    found = published("m", error_ratio=error_ratio, key=key)
    accuracy = AccuracyRecord(
        precision=precision,
        budget={"cosine_min": 0.9},
        measured={"cosine": 0.99},
        bounds={"cosine": 0.98},
        confidence=0.95,
        num_candidates=1,
        samples={"judged": 100},
        seed=0,
        digest="sha256:1",
    )
    winner, *others = found.candidates
    exact = precision == FLOAT32
    winner = replace(winner, accuracy=None if exact else accuracy)
    return replace(found, candidates=(winner, *others))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ((FLOAT32, 1.2), ("int8", 2e5), "drifted"),
        (("int8", 2e5), ("int8", 9e5), "unchanged"),
        (("bf16", 2e3), ("int8", 2e5), "unchanged"),
        (("int8", 0.1), (FLOAT32, 2.5), "unchanged"),
    ],
)
def test_error_ratios_of_lower_precision_are_not_compared(
    before: tuple[str, float], after: tuple[str, float], kind: str
) -> None:
    """Their budget judges them; but one that is not faster than float32 is worse."""
    (change,) = compare(
        [with_precision(before[0], "1", before[1])], [with_precision(after[0], "2", after[1])]
    )
    assert change.kind == kind
    assert (kind == "drifted") == ("int8, cosine at least 0.98" in change.why)


def test_fixed_new_and_removed() -> None:
    kinds = {
        change.model: change.kind
        for change in compare([failed("a"), OLD], [published("a", key="2"), published("b")])
    }
    assert kinds == {"a": "fixed", "b": "new", "m": "removed"}


def test_kept_eager_counts_as_eager() -> None:
    (change,) = compare([OLD], [kept_eager("m", key="2")])
    assert change.kind == "slower"


def test_same_artifact_is_unchanged() -> None:
    """Two judgements of one artifact differ by noise alone."""
    (change,) = compare(
        [OLD], [replace(published("m", speedup=1.2, key="2"), artifact=OLD.artifact)]
    )
    assert change.kind == "unchanged"


def test_figures_of_disturbed_rounds_are_marked_and_change_nothing() -> None:
    noisy = replace(published("m", speedup=512.0, key="2"), clock="disturbed")
    (change,) = compare([OLD], [noisy])
    assert change.kind == "unchanged"
    assert verdict_text(noisy).endswith(" ~512.00x")
    assert str(served_speed(noisy)).endswith(" ~512.00x")
    assert summarize([noisy, OLD]).gains == (OLD,)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two campaigns: `m` becomes slower, `ok` stays."""
    opened = Store.open(str(tmp_path / "store"), create=True)
    write_campaign(opened, "monday", [OLD, published("ok")])
    write_campaign(opened, "friday", [CHANGES["slower"], published("ok")], started=1_790_400_000.0)
    return opened


def test_compare_exits_with_regressions(store: Store) -> None:
    run = invoked(results.compare_app, "monday", "friday", "--store", store.uri)
    assert run.exit_code == 1
    assert (
        "slower: m cpu-x86-64-v4: inductor-frozen 1.50x (1.47-1.53), was inductor-frozen 1.80x"
        " (1.76-1.84)" in run.stdout
    )
    assert run.stdout.splitlines()[-1] == "1 slower, 1 unchanged"
    assert invoked(results.compare_app, "monday", "monday", "--store", store.uri).exit_code == 0


def test_compare_takes_the_last_finished_passes(store: Store) -> None:
    write_campaign(store, "monday", [], interrupted=True)
    write_campaign(store, "stopped", [OLD], interrupted=True)
    write_campaign(store, "empty", [])

    def code(*campaigns: str) -> int:
        return invoked(results.compare_app, *campaigns, "--store", store.uri).exit_code

    assert code("monday", "friday") == 1
    assert code("friday", "monday") == 0
    for name in ("stopped", "empty", "sunday"):
        assert code(name, "friday") == 2
        assert code("friday", name) == 2


def test_history_marks_regressions(store: Store) -> None:
    run = invoked(results.history_app, "m", "--store", store.uri)
    assert run.exit_code == 0
    rows = [line.split() for line in run.stdout.splitlines() if "published" in line]
    assert [next(word for word in row if word.endswith("x")) for row in rows] == [
        "1.50x",
        "1.80x",
    ]  # the latest first
    assert "slower: inductor-frozen 1.50x" in run.stdout
    assert (
        max(map(len, run.stdout.splitlines()[:-1])) <= 80
    )  # the sentence is wrapped by the terminal
