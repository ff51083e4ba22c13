"""The HTML report of a campaign: one file that needs no network, made of the ledger. page/ has its
template, style and script.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jinja2
from markupsafe import Markup

from freezer.artifact import ERROR_RATIO
from freezer.artifact.description import describe_freezing
from freezer.codec import Json, encode
from freezer.hardware import DEVICE_CLASSES, PORTABLE, can_run
from freezer.store import Store
from pipeline.ledger import CampaignRecord, History
from pipeline.records import Outcome, Outcomes, iso, outcome_table, shortened, summarize
from pipeline.reporting.comparison import PastOutcome, past_outcomes

MAX_UNPUBLISHED = 20
"""Unpublished models that the summary lists; the table has all."""

PAGE = Path(__file__).parent / "page"


def report_page(store: Store, campaign: str) -> bytes:
    """Return the report of a campaign in the ledger of a store, as a file's content.

    The details of all models are in it, compressed: about 1 kB for each model and device class.

    Raises:
        UsageError: the store lacks the campaign; the message lists those that it has.
    """
    history = History(store)
    record = history.record(campaign)
    outcomes = history.outcomes(campaign, record)
    by_model: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_model.setdefault(outcome.model, []).append(outcome)
    models = [details(history, name, of_model) for name, of_model in by_model.items()]
    summary = summarize(outcomes)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html").render(
        campaign=campaign,
        facts=[*_facts(record, outcomes), f"store {store.uri}"],
        summary=summary,
        error_ratio=ERROR_RATIO,
        most=MAX_UNPUBLISHED,
        store=store.uri,
        made=f"Made by Coldpress {version('coldpress')} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        css=Markup((PAGE / "report.css").read_text()),
        js=Markup((PAGE / "report.js").read_text()),
        overview=_script(overview(outcomes, store.uri)),
        details=_script(_compressed(models)),
    )
    return page.encode()


def _facts(record: CampaignRecord, outcomes: Outcomes) -> list[str]:
    """Return the first lines of the page: what ran, where, when."""
    state = "not finished" if record.exit_code is None else f"exit code {record.exit_code}"
    took = "" if record.finished is None else f"took {record.finished - record.started:.0f} s"
    torch = [facts.toolchain.get("torch") for facts in record.facts.values()]
    cpus = dict.fromkeys(outcome.host.get("cpu") for outcome in outcomes)
    minute = iso(record.started)[:16].replace("T", " ")
    facts = [
        record.catalog,
        f"started {minute} UTC",
        took,
        "interrupted" if record.interrupted else state,
        f"torch {torch[0]}" if torch else "",
        ", ".join(str(cpu) for cpu in cpus if cpu),
    ]
    return [fact for fact in facts if fact]


def _compressed(value: object) -> str:
    return base64.b64encode(gzip.compress(_json(value).encode(), mtime=0)).decode()


def _script(value: object) -> Markup:
    """Return JSON for a script element, which ends at the first `</`."""
    return Markup(_json(value).replace("<", "\\u003c"))


def _json(value: object) -> str:
    """Return JSON with five digits of floats, and with infinities and NaN, which JSON lacks, as
    strings.
    """
    text = json.dumps(value)
    return json.dumps(
        json.loads(
            text,
            parse_float=lambda digits: shortened(float(digits)),
            parse_constant=str,
        )
    )


MAX_HISTORY = 30
"""Latest outcomes of a model and class that its history shows."""

MAX_LOG_CHARS = 8000


def overview(outcomes: Outcomes, store: str) -> Json:
    """Return what the page shows at once: its classes, and a row for each outcome.

    Args:
        outcomes: of the campaign.
        store: URI of its store, as commands name it.
    """
    classes = {outcome.device_class for outcome in outcomes}
    shown = {"store": store, "classes": sorted(classes, key=_specific_first)}
    return {**shown, **outcome_table(outcomes)}


def details(
    history: History,
    model: str,
    outcomes: Outcomes,
) -> Json:
    """Return what the report shows of one model, besides its rows.

    Args:
        history: of the store.
        model: name of the model.
        outcomes: its outcomes in the campaign, one for each device class.
    """
    published = [
        outcome.device_class
        for outcome in outcomes
        if outcome.verdict in ("published", "kept-previous")
    ]
    machines = [one.device_class for one in outcomes if one.device_class in DEVICE_CLASSES]
    past = past_outcomes(history.of_model(model))
    return {
        "classes": {outcome.device_class: _detail(outcome) for outcome in outcomes},
        "serves": {machine: _rung(machine, published) for machine in machines},
        "history": {
            name: list(map(_past, reached[-MAX_HISTORY:])) for name, reached in past.items()
        },
    }


def _past(past: PastOutcome) -> Json:
    return {**encode(past), "time": iso(past.time)}


_LEFT_OUT = ("reports", "build_key")
"""Fields of a candidate that the page does not show."""


def _detail(outcome: Outcome) -> Json:
    """Return an outcome as the ledger has it, with the descriptions of its candidates."""
    detail = outcome.to_json()
    detail["log_tail"] = outcome.log_tail[-MAX_LOG_CHARS:]
    for shown, report in zip(detail["candidates"], outcome.candidates, strict=True):
        if report.explanation:
            shown |= {"explanation": report.explanation.text(), "plot": report.explanation.svg()}
        shown["freezing"] = list(
            describe_freezing(report.freezing, report.tried, accuracy=report.accuracy)
        )
        for point, figures in zip(shown["points"], report.points, strict=True):
            point["place"] = figures.place
        for name in _LEFT_OUT:
            del shown[name]
    return detail


def _rung(machine: str, published: Iterable[str]) -> str | None:
    """Return the published class that serves on machines of a class: its own, else the closest that
    they run; None if none does.
    """
    runnable = [name for name in published if name in DEVICE_CLASSES and can_run(name, machine)]
    return max(
        runnable,
        key=lambda name: sum(can_run(other, name) for other in DEVICE_CLASSES),
        default=None,
    )


def _specific_first(name: str) -> tuple[bool, int]:
    """Order of the columns: the most specific class first, `portable` last."""
    return name == PORTABLE, -list(DEVICE_CLASSES).index(name) if name in DEVICE_CLASSES else 0
