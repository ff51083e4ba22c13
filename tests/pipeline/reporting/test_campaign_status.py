"""The status of campaigns that were stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from freezer.errors import StoreUnreachableError
from freezer.store import Store
from pipeline.reporting import campaign_status, campaigns_in_words, in_words
from tests.conftest import Frozen
from tests.support.campaigns import run_judged
from tests.support.past_outcomes import BAD, DOWN
from tests.support.steps import HERE


def after_three(error: BaseException) -> Callable[[int], None]:
    """Ends a campaign when its third outcome of six is there, and two are final."""

    def end(count: int) -> None:
        if count == 3:
            raise error

    return end


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (StoreUnreachableError("the disk is gone"), "broken off"),
    ],
)
def test_stopped_campaign_reports_planned_and_reached(
    tmp_path: Path, scripted: Frozen, portable: Frozen, error: BaseException, state: str
) -> None:
    artifacts = {HERE: scripted.artifact, "portable": portable.artifact}
    store = Store.open(str(tmp_path / "store"), create=True)
    run_judged(store, DOWN, "stopped", artifacts, problems=(BAD,), after=after_three(error))
    found = campaign_status(store, "stopped")
    assert (found.state, found.reached, found.planned) == (state, 3, 7)
    assert any(
        line.startswith("3 of 7 outcomes: 1 failed, 2 published") for line in in_words(found, "s")
    )
    assert found.items["published"] == [f"first {HERE}", "first portable"]
    assert found.items["waiting"] == [
        f"kept {HERE}",
        "kept portable",
        f"gone {HERE}",
        "gone portable",
    ]
    [line] = campaigns_in_words(store)
    assert line.startswith(f"stopped: {state}, 3 of 7 outcomes, started 2023-11-14")
    run_judged(store, DOWN, "stopped", artifacts, problems=(BAD,))
    found = campaign_status(store, "stopped")
    assert (found.state, found.reached, found.planned, found.unchanged) == ("finished", 7, 7, 0)
