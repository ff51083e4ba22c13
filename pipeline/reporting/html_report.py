"""The HTML report of a campaign: one file that needs no network. page/ has its template, style and
script.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from freezer.store import Store
from pipeline.ledger import History
from pipeline.records import Outcome, summarize
from pipeline.reporting.report_data import ROW, CampaignData, campaign_data, details, overview

CHUNK = 50
"""Models whose details are compressed together, and opened together."""

MAX_UNPUBLISHED = 20
"""Unpublished models that the summary lists; the table has all."""

PAGE = Path(__file__).parent / "page"


def report_page(store: Store, campaign: str, *, against: str | None = None) -> bytes:
    """Return the report of a campaign in the ledger of a store, as a file's content.

    Args:
        store: of the campaign.
        campaign: its name.
        against: name of an earlier campaign to compare with.

    Raises:
        UsageError: the store lacks one of the campaigns.
    """
    return html_report(campaign_data(History(store), campaign, store=store.uri, against=against))


def html_report(data: CampaignData) -> bytes:
    """Return the report as a file's content.

    The details of all models are in it, compressed: about 1 kB for each model and device class.
    """
    by_model: dict[str, list[Outcome]] = {}
    for outcome in data.outcomes:
        by_model.setdefault(outcome.model, []).append(outcome)
    names, shown, summary = list(by_model), overview(data), summarize(data.outcomes)
    texts = [
        _compressed([details(data, name, by_model[name]) for name in names[first : first + CHUNK]])
        for first in range(0, len(names), CHUNK)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html").render(
        campaign=data.campaign,
        facts=_facts(shown),
        summary=summary,
        most=MAX_UNPUBLISHED,
        load=_load(summary.gains[0].model, data.store) if summary.gains else "",
        against=data.against,
        changes=Counter(
            change.kind for change in data.changes.values() if change.kind != "removed"
        ),
        removed=[
            f"{change.model} {change.device_class}"
            for change in data.changes.values()
            if change.kind == "removed"
        ],
        made=f"Made by Coldpress {version('coldpress')} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        css=Markup((PAGE / "report.css").read_text()),
        js=Markup((PAGE / "report.js").read_text()),
        overview=_script({**shown, "columns": ROW}),
        chunks=_script({"size": CHUNK, "texts": texts}),
    )
    return page.encode()


def _facts(shown: Mapping[str, Any]) -> list[str]:
    """The first lines of the page: what ran, where, when."""
    state = (
        "interrupted"
        if shown["interrupted"]
        else "not finished"
        if shown["exit_code"] is None
        else f"exit code {shown['exit_code']}"
    )
    took = f"took {shown['seconds']:.0f} s" if shown["seconds"] is not None else ""
    started = str(shown["started"])[:16].replace("T", " ") + " UTC"
    torch = shown["toolchain"].get("torch")
    hosts: Sequence[str] = shown["hosts"]
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    machines = ", ".join(hosts[:3]) + more
    facts = [
        shown["catalog"],
        f"started {started}",
        took,
        state,
        f"torch {torch}" if torch else "",
        machines,
        f"store {shown['store']}",
    ]
    return [fact for fact in facts if fact]


def _load(model: str, store: str) -> str:
    return f"import freezer\n\nmodel = freezer.load({json.dumps(model)}, store={json.dumps(store)})"


def _compressed(found: Any) -> str:
    return base64.b64encode(
        gzip.compress(json.dumps(found, allow_nan=False).encode(), mtime=0)
    ).decode()


def _script(found: Any) -> Markup:
    """JSON for a script element, which ends at the first `</`."""
    return Markup(json.dumps(found, allow_nan=False).replace("<", "\\u003c"))
