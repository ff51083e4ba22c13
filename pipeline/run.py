"""Run a campaign: plan -> build -> judge -> publish -> record -> track -> report. READ THIS FIRST.

catalog      the models to freeze                                          catalog/
materials    their files, brought to the workers                           sources/, workspace/
fleet        nodes, their device classes, what they share with the driver  scheduling/, cluster/
plan         which builds and judges are needed, and which are finished    planning/
execute      builds and judges in parallel, each in an isolated child      scheduling/, worker/
publish      a version of a model, once all its classes are decided        publish.py
record       outcomes, and the members of the campaign                     ledger/
track        the same in MLflow, which can be replayed from the ledger     tracking/
report       the table, the JSON and the HTML page                         reporting/
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from freezer.codec import frozen
from freezer.errors import CatalogError, InfrastructureError
from freezer.hardware import AUTO_PRECISE, detect
from freezer.store import WORK, Store
from pipeline.campaign import Campaign
from pipeline.catalog import (
    Catalog,
    Entry,
    is_registry,
    read_catalog,
    read_entries,
    read_registry,
    refuse_bad_entries,
)
from pipeline.cluster import connect, joined_address
from pipeline.config import Config
from pipeline.ledger import CampaignRecord, Continued, Ledger
from pipeline.planning import (
    FileDigests,
    FinishedWork,
    Plan,
    PlanRequest,
    make_plan,
)
from pipeline.records import FleetFacts, LiveFigures, Note, Outcome
from pipeline.reporting import CampaignReport, Display, display_for, explain_plan
from pipeline.scheduling import (
    BuildRecords,
    Executor,
    Fleet,
    SharedFiles,
    facts_here,
    skipped_outcomes,
    with_memory_here,
)
from pipeline.sources import Materials
from pipeline.tracking import TrackerProcess
from pipeline.worker import infer_inputs
from pipeline.workspace import remove_abandoned, workplace


@frozen
class Work:
    """What a campaign is about: entries that can be planned, the problems of the others, and where
    their files are kept.
    """

    store: Store
    digests: FileDigests
    materials: Materials
    entries: Sequence[Entry]
    problems: Sequence[CatalogError]

    @property
    def classes(self) -> set[str]:
        """The requested classes, also `auto`."""
        requested = set[str]()
        for entry in self.entries:
            requested.update(entry.device_classes)
            if entry.precision and "auto" in entry.device_classes:
                requested.add(AUTO_PRECISE)
        return requested


def run(config: Config, display: Display | None = None) -> CampaignReport:
    """Run a campaign until it ends or is interrupted.

    Args:
        config: what to run, and where.
        display: shows the events; by default it prints them.

    Raises:
        CatalogError: the catalog or some entries are bad; nothing was started.
        UsageError: a setting is invalid.
        InfrastructureError, StoreUnreachableError: Ray or the store cannot be reached.
    """
    started, display = time.time(), display or display_for(Console())
    work = prepare(config, display.note)
    ledger = Ledger(work.store, config.campaign, display.note)
    uri, mode = config.tracking_uri, config.mlflow_artifacts
    tracker = TrackerProcess(uri, config.campaign, work.store.uri, mode=mode)
    with ledger, display, tracker, ExitStack() as held:
        continued, executor = Continued(ledger, started), None
        planned = _plan_without_ray(config, work, ledger)
        if planned is None:
            fleet = held.enter_context(_assembled(config, work, continued, display))
            display.note(f"Ray has {len(fleet.nodes)} node(s) for {', '.join(fleet.classes)}")
            planned = _plan(config, work, ledger, _workers(fleet))
            executor = Executor(planned[0], fleet, work.store, ledger, work.materials, display.show)
            display.observe(lambda: _live_figures(fleet, tracker))
        plan, skipped = planned
        for line in plan.notes:
            display.note(line)
        campaign = Campaign(
            config=config,
            plan=plan,
            executor=executor,
            store=work.store,
            ledger=ledger,
            tracker=tracker,
            display=display,
        )
        held.callback(remove_abandoned, work.store.root)
        return campaign.run(skipped, continued, started)


def explain(config: Config, display: Display) -> None:
    """Show what `run` would do and why, and do nothing. Takes no lock, so it can run beside a
    driver.

    A cluster is asked for its workers. Without one the plan is for this machine and needs no Ray.

    Raises:
        CatalogError, UsageError, InfrastructureError, StoreUnreachableError: as `run`.
    """
    note = display.note
    work = prepare(config, note)
    with (
        Ledger(
            work.store,
            config.campaign,
            note,
            read_only=True,
        ) as ledger,
        display,
    ):
        continued = Continued(ledger, time.time())
        if joined_address(config.address):
            with _assembled(config, work, continued, display) as fleet:
                workers = _workers(fleet)
        else:
            note("planning for this machine; --address plans for the workers of a cluster")
            workers = facts_here(work.entries, work.classes, note), [detect().classes]
        plan, skipped = _plan(config, work, ledger, workers)
        records = BuildRecords(work.store, ledger, lifted=config.lift_quarantine)
        for line in plan.notes:
            note(line)
        explain_plan(plan, skipped, records, display)


def read(config: Config) -> Catalog:
    """Read the catalog of a campaign.

    Raises:
        UsageError: a setting is invalid.
        CatalogError: it is not a catalog, or is empty. Errors of single entries are in `problems`.
    """
    config.check()
    config.check_places()
    if config.entries is not None:
        return read_entries(config.entries, only=config.only)
    if is_registry(config.catalog_name):
        return read_registry(
            config.catalog_name,
            config.tracking_uri,
            filter_string=config.filter_string,
            trust=config.trust,
            only=config.only,
        )
    return read_catalog(Path(config.catalog_name), only=config.only)


def check(config: Config, note: Note) -> int:
    """Check the entries of the catalog, and return their number.

    Raises:
        BadEntriesError: an entry is bad.
        CatalogError, UsageError: as `run`.
    """
    catalog = read(config)
    _, refused = infer_inputs(catalog.entries, {}, note)
    refuse_bad_entries((*catalog.problems, *refused), keep_going=False)
    return len(catalog.entries)


def prepare(config: Config, note: Note) -> Work:
    """Read the catalog, and bring what the keys of its entries need.

    Raises:
        CatalogError, UsageError, StoreUnreachableError: as `run`.
        InfrastructureError: MLflow is needed and cannot be reached.
    """
    note(config.places)
    catalog = read(config)
    refuse_bad_entries(catalog.problems, keep_going=config.keep_going)
    store = Store.open(config.store, create=True)
    digests = FileDigests(store.root / WORK / "digests.json")
    materials = Materials(store.root, config.tracking_uri, digests, place=workplace(store.uri))
    configured = [_configured(entry, config) for entry in catalog.entries]
    resolved, unusable = materials.resolve(configured)
    entries, refused = infer_inputs(resolved, digests.known, note)
    digests.save()
    problems = (*catalog.problems, *unusable, *refused)
    refuse_bad_entries(problems, keep_going=config.keep_going)
    return Work(
        store=store,
        digests=digests,
        materials=materials,
        entries=entries,
        problems=problems,
    )


def _configured(entry: Entry, config: Config) -> Entry:
    """An entry with the settings of the campaign, which replace its own."""
    return replace(
        entry,
        device_classes=config.device_classes or entry.device_classes,
        recipes=config.recipes or entry.recipes,
        limits=replace(entry.limits, allow_regression=config.allow_regression),
    )


@contextmanager
def _assembled(
    config: Config,
    work: Work,
    continued: Continued,
    display: Display,
) -> Iterator[Fleet]:
    """Connect to Ray, which takes 8 to 20 s where it has to start, and find its nodes."""
    joined, store = joined_address(config.address), work.store
    display.note(f"connecting to Ray at {joined}" if joined else "starting Ray on this machine")
    shared = SharedFiles(
        store=store.root,
        files=config.files,
        bucket_uri=store.uri if store.remote is not None else None,
    )
    with connect(config.address) as cluster:
        fleet = Fleet(
            cluster,
            display.show,
            shared,
            wait_s=config.wait_s,
            before=continued.facts,
        )
        with fleet.assembled(work.classes):
            yield fleet


Workers = tuple[FleetFacts, Sequence[Sequence[str]]]
"""The facts of each class, and the classes of each node."""


def _workers(fleet: Fleet) -> Workers:
    return fleet.facts(), [node.classes for node in fleet.nodes]


def _live_figures(fleet: Fleet, tracker: TrackerProcess) -> LiveFigures:
    """The nodes in use and MLflow's backlog. Thread-safe."""
    return LiveFigures(
        nodes=Counter(name for node in fleet.nodes for name in node.classes),
        num_logged=tracker.num_logged,
        num_unlogged=tracker.num_unlogged,
    )


def _plan_without_ray(
    config: Config,
    work: Work,
    ledger: Ledger,
) -> tuple[Plan, list[Outcome]] | None:
    """The same as `_plan` if a local Ray would have nothing to do, so that it need not start; None
    if there may be work.
    """
    rows, served = ledger.rows("campaign"), detect().classes
    recorded = CampaignRecord.from_json(rows[-1].data).facts if rows else {}
    known = with_memory_here(recorded)
    if joined_address(config.address) or not set(known) <= set(served):
        return None
    try:
        # First with the facts of the last campaign: finding today's takes seconds.
        planned = _plan(config, work, ledger, (known, [served]))
        if planned[0].is_finished:
            facts = facts_here(work.entries, work.classes, lambda _: None)
            if facts != known:
                planned = _plan(config, work, ledger, (facts, [served]))
    except (InfrastructureError, RuntimeError):  # a start of Ray reports it
        return None
    return planned if planned[0].is_finished else None


def _plan(
    config: Config,
    work: Work,
    ledger: Ledger,
    workers: Workers,
) -> tuple[Plan, list[Outcome]]:
    """Return the plan, and the outcomes of what --keep-going skips."""
    facts, nodes = workers
    request = PlanRequest(
        entries=work.entries,
        facts=facts,
        nodes=nodes,
        policy=config.policy,
        keep_going=config.keep_going,
    )
    finished = FinishedWork(work.store, ledger, lifted=config.lift_quarantine)
    plan = make_plan(request, finished, work.digests)
    return plan, [*skipped_outcomes(work.problems), *plan.skipped]
