"""Whatever decodes can be shown: rows of a ledger with any change to one value."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from freezer.codec import encode
from freezer.errors import ColdpressError
from freezer.store import Store
from jobs import results
from pipeline.ledger import CampaignRecord, Ledger, Member
from pipeline.records import BuildResult, Outcome
from pipeline.reporting import (
    CampaignReport,
    campaign_status,
    campaigns_in_words,
    compare,
    in_words,
    print_report,
    report_page,
)
from pipeline.tracking import campaign_summary
from pipeline.tracking.campaign_summary import campaign_metrics, summary_table
from pipeline.tracking.run_records import free_tags, run_records
from tests.support.documents import places
from tests.support.outcomes import failed, outcome
from tests.support.past_outcomes import PUBLISHED

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 2**62, -(2**62), 10**400, 0.0, 1e308, -1e308, 5e-324])
    | st.sampled_from([math.nan, math.inf, -math.inf, "", "published", "failed", "\x00", "a\nb"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
REMOVED = object()


@st.composite
def changed(draw: st.DrawFn, record: Any) -> Any:
    """The JSON of a record with one value replaced or removed."""
    document = json.loads(json.dumps(record))
    *above, last = draw(st.sampled_from([place for place in places(document) if place]))
    parent = document
    for part in above:
        parent = parent[part]
    value = draw(VALUES | st.just(REMOVED))
    if value is REMOVED:
        del parent[last]
    else:
        parent[last] = value
    return document


OUTCOMES: list[dict[str, Any]] = [
    made.to_json() for made in (PUBLISHED, outcome("a"), failed("b"), replace(PUBLISHED, model="c"))
]
MEMBERS = tuple(
    Member(judge_key=made["judge_key"], model=made["model"], device_class="portable", cached=False)
    for made in OUTCOMES
)
CAMPAIGN = CampaignRecord(
    catalog="c.yaml",
    started=1.7e9,
    finished=1.7e9,
    exit_code=0,
    members=MEMBERS,
    problems=(failed("bad"),),
).to_json()
BUILD = BuildResult(key="", recipe="portable").to_json()


@given(document=st.sampled_from(OUTCOMES).flatmap(changed))
@SETTINGS
def test_outcomes_are_shown(tmp_path: Path, document: Any) -> None:
    try:
        made = Outcome.from_json(document)
        _ = [report.freezing for report in made.candidates]  # decoded when shown
    except ColdpressError:
        return
    report = CampaignReport(campaign="c", started=0, finished=1, outcomes=(made,))
    print_report(report, Console(file=StringIO()))
    report.write_json(tmp_path / "report.json")
    place: dict[str, Any] = {"model": made.model, "device_class": made.device_class}
    for other in (replace(PUBLISHED, **place), replace(PUBLISHED, judge_key="k", **place)):
        [encode(change) for change in compare([other], [made]) + compare([made], [other])]
    campaign_summary.campaign_description([made])
    campaign_summary.version_description(made, "./store")
    run_records(made, "c")
    free_tags(made)
    campaign_metrics([made])
    summary_table([made])


def print_history(store: Store, model: str) -> None:
    """Print what `coldpress history` prints."""
    runner = CliRunner()
    for form in ([], ["--json"]):
        done = runner.invoke(results.history_app, [model, "--store", store.uri, *form])
        assert isinstance(done.exception, SystemExit | None), done.exception


@pytest.mark.parametrize("changed_kind", ["campaign", "outcome", "build"])
def test_ledgers_are_shown(tmp_path: Path, changed_kind: str) -> None:
    whole = {"campaign": CAMPAIGN, "outcome": {"outcome": OUTCOMES[0]}, "build": BUILD}

    @given(document=changed(whole[changed_kind]))
    @SETTINGS
    def shown(document: Any) -> None:
        number = len(list(tmp_path.iterdir()))
        store = Store.open(str(tmp_path / str(number)), create=True)
        rows = {**whole, changed_kind: document}
        with Ledger(store, "c") as ledger:
            key, model = OUTCOMES[0]["judge_key"], OUTCOMES[0]["model"]
            ledger.append("campaign", "c", model="", device_class="", data=rows["campaign"])
            ledger.append("outcome", key, model=model, device_class="x", data=rows["outcome"])
            ledger.append("build", "b", model=model, device_class="x", data=rows["build"])
        for show in (
            lambda: report_page(store, "c"),
            lambda: in_words(campaign_status(store, "c"), store.uri),
            lambda: json.dumps(campaign_status(store, "c").to_json(), allow_nan=False),
            lambda: campaigns_in_words(store),
            lambda: print_history(store, model),
        ):
            try:
                show()
            except ColdpressError:
                continue

    shown()
