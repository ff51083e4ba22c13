"""Run a campaign: plan -> build -> judge -> publish -> report. READ THIS FIRST.

catalog      the models to freeze                                                      catalog/
materials    their files, brought to where workers find them                           sources/, workspace/
fleet        the nodes, their device classes, what they share with the driver          scheduling/fleet.py, cluster/
plan         which builds and judges are needed, and what is finished already          planning/
execute      builds in parallel, judges alone, each in an isolated child               scheduling/, worker/
publish      one version of a model, when all its classes have verdicts                publish.py
record       outcomes, and the members of the campaign                                 ledger/
track        the same in MLflow, where it can be replayed from the ledger              tracking/
report       the table, and the JSON                                                   reporting/
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from freezer.errors import CatalogError, ColdpressError
from freezer.store.store import WORK, Store
from pipeline.campaign import Campaign
from pipeline.catalog.catalog import Catalog, is_registry, read_catalog, read_registry
from pipeline.catalog.entry import Entry
from pipeline.cluster.connect import check_address, connect
from pipeline.config import Config
from pipeline.ledger.campaign_record import Continued
from pipeline.ledger.ledger import Ledger
from pipeline.planning.file_digests import FileDigests
from pipeline.planning.item import Plan
from pipeline.planning.plan import PlanRequest, auto_classes_of, make_plan
from pipeline.planning.reuse import FinishedWork
from pipeline.records.events import Event
from pipeline.records.failure import Failure
from pipeline.records.outcome import Outcome
from pipeline.reporting.campaign_report import CampaignReport
from pipeline.reporting.display import Display
from pipeline.scheduling.executor import Executor
from pipeline.scheduling.fleet import Fleet, assembled
from pipeline.sources.materials import Materials
from pipeline.tracking.process import TrackerProcess
from pipeline.workspace.staging import remove_abandoned
from pipeline.workspace.workspace import workplace


class BadEntriesError(CatalogError):
    """Some entries of the catalog are bad, and nothing was started. `problems` has each."""

    def __init__(self, problems: Sequence[CatalogError]) -> None:
        super().__init__(
            f"{len(problems)} bad {'entry' if len(problems) == 1 else 'entries'}; mend them, or run the others with --keep-going",
            code="CP-CATALOG-ENTRIES",
        )
        self.problems = tuple(problems)


def run(config: Config, display: Display) -> CampaignReport:
    """Run a campaign to its end, or until it is interrupted.

    Raises:
        CatalogError: the catalog or some entries are bad, and nothing was started.
        UsageError: the address is none that a driver can take.
        InfrastructureError, StoreUnreachableError: Ray or the store cannot be reached at the start.
    """
    started = time.time()
    check_address(config.address)
    catalog = _read(config)
    _refuse_bad_entries(config, catalog.problems)
    store = Store.open(config.store, create=True)
    digests = FileDigests(store.root / WORK / "digests.json")
    materials = Materials(store.root, config.tracking_uri, digests, place=workplace(store.uri))
    entries, unusable = materials.resolve(catalog.entries)
    digests.save()
    problems = (*catalog.problems, *unusable)
    _refuse_bad_entries(config, problems)

    def tell(text: str) -> None:
        display.show(Event(kind="note", text=text))

    on_sigterm = signal.getsignal(signal.SIGTERM)
    ledger = Ledger(store, config.campaign, tell, read_only=config.explain)
    with ledger, display, connect(config.address) as cluster:
        if callable(on_sigterm):  # Ray has put one of its own in its place, by which nothing would be recorded
            signal.signal(signal.SIGTERM, on_sigterm)
        if not config.explain:
            remove_abandoned(str(store.root))
        files = Path.cwd() if is_registry(config.catalog) else Path(config.catalog)
        seen = {"store": store.root / WORK, "files": files.absolute()}
        reached = store.uri if store.remote is not None else None
        continued = Continued(ledger, started)
        found = Fleet(cluster, display.show, **seen, wait_s=config.wait_s, reached=reached, before=continued.facts)
        tracker = TrackerProcess(config.tracking_uri, config.campaign, store.uri, mode=config.mlflow_artifacts)
        with nullcontext() if config.explain else tracker, assembled(found, _named(config, entries)) as fleet:
            display.show(Event(kind="note", text=f"Ray has {len(fleet.nodes)} node(s) for {', '.join(fleet.classes)}"))
            request = PlanRequest(
                entries=entries,
                facts=fleet.facts(),
                auto=auto_classes_of([node.classes for node in fleet.nodes]),
                device_classes=config.device_classes,
                recipes=config.recipes,
                policy=config.policy,
                keep_going=config.keep_going,
            )
            finished = FinishedWork(store, ledger, lifted=config.lift_quarantine, since=continued.own_since)
            plan = make_plan(request, finished, digests)
            bad = [*_problem_outcomes((*problems, *plan.problems)), *_unplaced_outcomes(plan)]
            if config.explain:
                return _explained(config, plan, bad, display, started)
            executor = Executor(plan, fleet, store, ledger, materials, display.show)
            tracker.may_work = executor.may_disturb
            try:
                campaign = Campaign(config, plan, executor, store, ledger, tracker, display)
                campaign.start(bad, continued)
                return campaign.finish(bad, started)
            finally:
                remove_abandoned(str(store.root))


def _read(config: Config) -> Catalog:
    if is_registry(config.catalog):
        return read_registry(
            config.catalog, config.tracking_uri, filter_string=config.filter_string, trust=config.trust, only=config.only
        )
    return read_catalog(Path(config.catalog), only=config.only)


def _refuse_bad_entries(config: Config, problems: Sequence[CatalogError]) -> None:
    if problems and not config.keep_going:
        raise BadEntriesError(problems)


def _named(config: Config, entries: Sequence[Entry]) -> set[str]:
    """The classes that are asked for by name."""
    return (set(config.device_classes) or {name for entry in entries for name in entry.device_classes}) - {"auto"}


def _problem_outcomes(problems: Sequence[CatalogError]) -> list[Outcome]:
    """The outcomes of bad entries that --keep-going passes over."""
    return [_without_work(problem.entry or "?", "auto", "source", problem) for problem in problems]


def _unplaced_outcomes(plan: Plan) -> list[Outcome]:
    """The outcomes of classes that no node serves, which --keep-going passes over."""
    return [_without_work(item.model, item.device_class, "infrastructure", item.problem) for item in plan.unplaced]


def _without_work(model: str, device_class: str, failure: str, error: ColdpressError) -> Outcome:
    return Outcome(
        model=model,
        device_class=device_class,
        verdict="failed",
        failure=Failure(kind=failure, code=error.code, message=str(error)),
        reason=str(error),
        num_threads=0,
        source="",
        source_key="",
        judge_key="",
    )


def _explained(config: Config, plan: Plan, bad: Sequence[Outcome], display: Display, started: float) -> CampaignReport:
    """Say of every item what would be done and why; do nothing."""
    for item in plan.items:
        doing = "unchanged" if item.finished else f"build {', '.join(item.missed or item.builds) or 'nothing'}; judge"
        doing += " if it is built" if item.missed else ""
        why = "" if item.why == "unchanged" else f" ({item.why})"
        display.show(Event(kind="note", text=f"{item.entry.name} {item.device_class}: {doing}{why}"))
    for outcome in bad:
        display.show(Event(kind="note", text=f"{outcome.model} {outcome.device_class}: nothing ({outcome.coded_reason})"))
    return CampaignReport(campaign=config.campaign, started=started, finished=time.time(), outcomes=())
