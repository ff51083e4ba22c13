"""Run a campaign: plan -> build -> judge -> publish -> record -> track -> report. READ THIS FIRST.

catalog      the models to freeze                                                      catalog/
materials    their files, brought to the workers                                       sources/, workspace/
fleet        the nodes, their device classes, what they share with the driver          scheduling/fleet.py, cluster/
plan         which builds and judges are needed, and which are finished                planning/
execute      builds in parallel, judges alone, each in an isolated child               scheduling/, worker/
publish      a version of a model, once all its classes are decided                    publish.py
record       outcomes, and the members of the campaign                                 ledger/
track        the same in MLflow, which can be replayed from the ledger                 tracking/
report       the table and the JSON                                                    reporting/
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from freezer.store.store import WORK, Store
from pipeline.campaign import Campaign
from pipeline.catalog.catalog import Catalog, is_registry, read_catalog, read_registry, refuse_bad_entries
from pipeline.catalog.entry import Entry
from pipeline.cluster.connect import check_address, connect
from pipeline.cluster.ray_cluster import Cluster
from pipeline.config import Config
from pipeline.ledger.campaign_record import Continued
from pipeline.ledger.ledger import Ledger
from pipeline.planning.keys import FileDigests
from pipeline.planning.plan import FinishedWork, PlanRequest, auto_classes_of, make_plan
from pipeline.records.events import Event
from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.display import Display
from pipeline.reporting.explain import explain_plan
from pipeline.scheduling.executor import Executor
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.item_state import skipped_outcomes
from pipeline.sources.materials import Materials
from pipeline.tracking.process import TrackerProcess
from pipeline.workspace.staging import remove_abandoned
from pipeline.workspace.workspace import workplace


def run(config: Config, display: Display) -> CampaignReport:
    """Run a campaign until it ends or is interrupted.

    Raises:
        CatalogError: the catalog or some entries are bad; nothing was started.
        UsageError: the address is not one that a driver can use.
        InfrastructureError, StoreUnreachableError: Ray or the store cannot be reached at the start.
    """
    started = time.time()
    check_address(config.address)
    catalog = _read(config)
    refuse_bad_entries(catalog.problems, keep_going=config.keep_going)
    store = Store.open(config.store, create=True)
    digests = FileDigests(store.root / WORK / "digests.json")
    materials = Materials(store.root, config.tracking_uri, digests, place=workplace(store.uri))
    entries, unusable = materials.resolve(catalog.entries)
    digests.save()
    problems = (*catalog.problems, *unusable)
    refuse_bad_entries(problems, keep_going=config.keep_going)

    def note(text: str) -> None:
        display.show(Event(kind="note", text=text))

    on_sigterm = signal.getsignal(signal.SIGTERM)
    ledger = Ledger(store, config.campaign, note, read_only=config.explain)
    with ledger, display, connect(config.address) as cluster:
        if callable(on_sigterm):  # Ray installs a handler that would end the process before anything is recorded
            signal.signal(signal.SIGTERM, on_sigterm)
        continued = Continued(ledger, started)
        fleet = _fleet(config, cluster, store, continued, display)
        tracker = TrackerProcess(config.tracking_uri, config.campaign, store.uri, mode=config.mlflow_artifacts)
        requested = set(config.device_classes) or {name for entry in entries for name in entry.device_classes}
        with nullcontext() if config.explain else tracker, fleet.assembled(requested):
            note(f"Ray has {len(fleet.nodes)} node(s) for {', '.join(fleet.classes)}")
            finished = FinishedWork(store, ledger, lifted=config.lift_quarantine, since=continued.own_since)
            plan = make_plan(_request(config, entries, fleet), finished, digests)
            skipped = skipped_outcomes((*problems, *plan.problems), plan.unplaced)
            if config.explain:
                explain_plan(plan, skipped, display)
                return CampaignReport(campaign=config.campaign, started=started, finished=time.time(), outcomes=())
            executor = Executor(plan, fleet, store, ledger, materials, display.show)
            tracker.may_work = executor.may_disturb
            try:
                campaign = Campaign(config, plan, executor, store, ledger, tracker, display)
                return campaign.run(skipped, continued, started)
            finally:
                remove_abandoned(str(store.root))


def _read(config: Config) -> Catalog:
    if is_registry(config.catalog):
        return read_registry(
            config.catalog, config.tracking_uri, filter_string=config.filter_string, trust=config.trust, only=config.only
        )
    return read_catalog(Path(config.catalog), only=config.only)


def _fleet(config: Config, cluster: Cluster, store: Store, continued: Continued, display: Display) -> Fleet:
    files = Path.cwd() if is_registry(config.catalog) else Path(config.catalog).absolute()
    return Fleet(
        cluster,
        display.show,
        store=store.root / WORK,
        files=files,
        wait_s=config.wait_s,
        reached=store.uri if store.remote is not None else None,
        before=continued.facts,
    )


def _request(config: Config, entries: Sequence[Entry], fleet: Fleet) -> PlanRequest:
    return PlanRequest(
        entries=entries,
        facts=fleet.facts(),
        auto=auto_classes_of([node.classes for node in fleet.nodes]),
        device_classes=config.device_classes,
        recipes=config.recipes,
        policy=config.policy,
        keep_going=config.keep_going,
    )
