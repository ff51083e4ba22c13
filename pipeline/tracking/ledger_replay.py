"""Replay: bring MLflow up to date from the ledger alone. Repeating it changes nothing.

Outcomes that only an earlier start of a campaign reached get runs, but no row in the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from freezer.errors import INTERRUPTED, InfrastructureError
from freezer.store import Store
from pipeline.ledger import CampaignRecord, History, Reached, campaign_lock, ledger_folder
from pipeline.tracking.campaign_summary import CampaignEnd, CampaignStart
from pipeline.tracking.registry import ArtifactMode
from pipeline.tracking.tracker import Tracker

Page = Callable[[Store, str], bytes]
"""Makes the HTML report of a campaign in a store."""


def replay(
    store: Store,
    tracking_uri: str,
    campaign: str | None,
    *,
    mode: ArtifactMode = "copy",
    page: Page | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Log the outcomes that MLflow does not show, of one campaign or of all, oldest first;
    return errors, one sentence each.

    Args:
        store: store of the campaigns; its ledger is only read.
        tracking_uri: URI of MLflow.
        campaign: name of the campaign; None means all that are not running.
        mode: whether MLflow stores whole artifacts, or references.
        page: makes the report of a campaign; None for none.

    Raises:
        UsageError: the store has no such campaign; the message lists existing ones.
        InfrastructureError: the campaign is running.
        StoreUnreachableError: the store or its ledger cannot be read.
    """
    history = History(store)
    replayed = partial(_replay_one, store, history, tracking_uri, mode=mode, page=page, say=say)
    if campaign is not None:
        history.record(campaign)
        return replayed(campaign).failures
    failures: list[str] = []
    for name in history.campaigns():
        try:
            tracker = replayed(name)
        except InfrastructureError as error:
            say(f"campaign {name} is skipped: {error}")
            continue
        failures += tracker.failures
        if tracker.broke_off:
            break
    return failures


def _replay_one(
    store: Store,
    history: History,
    tracking_uri: str,
    campaign: str,
    *,
    mode: ArtifactMode,
    page: Page | None,
    say: Callable[[str], None],
) -> Tracker:
    with campaign_lock(ledger_folder(store), campaign, say, remote=store.remote):
        history.refresh(campaign)
        record = history.record(campaign)
        members = history.members(campaign, record)
        models: dict[str, list[Reached]] = {}
        for item in (*history.others(campaign, record), *members):
            models.setdefault(item.outcome.model, []).append(item)
        tracker = Tracker(tracking_uri, campaign, store, mode=mode)
        tracker.start(
            CampaignStart(
                catalog=record.catalog, started=record.started, parameters=record.parameters
            )
        )
        for reached in models.values():
            outcomes = [item.outcome for item in reached]
            tracker.log(outcomes, max(item.time for item in reached))
        end = _end_of(record, [item.time for item in members])
        if page is not None:
            end = replace(end, page=page(store, campaign))
        tracker.finish([*(item.outcome for item in members), *record.problems], end)
    say(f"campaign {campaign}: MLflow shows {tracker.num_logged} outcomes")
    for line in (*tracker.notes, *tracker.failures):
        say(line)
    return tracker


def _end_of(record: CampaignRecord, times: Sequence[float]) -> CampaignEnd:
    """Return how a campaign ended; one whose driver was killed ended with its last outcome."""
    if record.finished is None:
        finished = max([record.started, *times])
        return CampaignEnd(
            exit_code=INTERRUPTED,
            interrupted=True,
            finished=finished,
        )
    exit_code = INTERRUPTED if record.exit_code is None else record.exit_code
    return CampaignEnd(
        exit_code=exit_code,
        interrupted=record.interrupted,
        finished=record.finished,
    )
