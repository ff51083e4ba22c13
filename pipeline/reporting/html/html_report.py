"""The HTML report of a campaign: one file that needs no network. page/ has its template, style and
script.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jinja2
from markupsafe import Markup

from freezer.store import Store
from pipeline.ledger import History
from pipeline.records import Outcome, iso, summarize
from pipeline.reporting.html.report_data import CampaignData, campaign_data, details, overview

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
    models = [details(data, name, outcomes) for name, outcomes in by_model.items()]
    chunks = []
    for first in range(0, len(models), CHUNK):
        chunks.append(_compressed(models[first : first + CHUNK]))
    summary = summarize(data.outcomes)
    changes = Counter[str]()
    removed = []
    for change in data.changes.values():
        if change.kind == "removed":
            removed.append(f"{change.model} {change.device_class}")
        else:
            changes[change.kind] += 1
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html").render(
        campaign=data.campaign,
        facts=_facts(data),
        summary=summary,
        most=MAX_UNPUBLISHED,
        load=_load(summary.gains[0].model, data.store) if summary.gains else "",
        against=data.against,
        changes=changes,
        removed=removed,
        made=f"Made by Coldpress {version('coldpress')} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        css=Markup((PAGE / "report.css").read_text()),
        js=Markup((PAGE / "report.js").read_text()),
        overview=_script(overview(data)),
        chunks=_script({"size": CHUNK, "texts": chunks}),
    )
    return page.encode()


def _facts(data: CampaignData) -> list[str]:
    """Return the first lines of the page: what ran, where, when."""
    record = data.record
    state = "not finished" if record.exit_code is None else f"exit code {record.exit_code}"
    took = "" if record.finished is None else f"took {record.finished - record.started:.0f} s"
    torch = ""
    for classes in record.facts.values():
        torch = torch or str(classes.toolchain.get("torch", ""))
    cpus = dict[str, None]()
    for outcome in data.outcomes:
        if outcome.host.get("cpu"):
            cpus[str(outcome.host["cpu"])] = None
    minute = iso(record.started)[:16].replace("T", " ")
    facts = [
        record.catalog,
        f"started {minute} UTC",
        took,
        "interrupted" if record.interrupted else state,
        f"torch {torch}" if torch else "",
        ", ".join(cpus),
        f"store {data.store}",
    ]
    return [fact for fact in facts if fact]


def _load(model: str, store: str) -> str:
    name, place = json.dumps(model), json.dumps(store)
    return f"import freezer\n\nmodel = freezer.load({name}, store={place})"


def _compressed(value: object) -> str:
    data = _json(value).encode()
    compressed = gzip.compress(data, mtime=0)
    return base64.b64encode(compressed).decode()


def _script(value: object) -> Markup:
    """Return JSON for a script element, which ends at the first `</`."""
    return Markup(_json(value).replace("<", "\\u003c"))


def _json(value: object) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    """Return a JSON value with infinities and NaN as strings, which JSON lacks, and floats with
    five digits.
    """
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
