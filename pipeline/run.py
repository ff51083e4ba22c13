"""Run a campaign: plan -> build -> judge -> publish -> report. READ THIS FIRST.

catalog      the models to freeze                                                      catalog.py, entry.py
materials    what they are made of, brought to where workers find it                   materials.py, workplace.py
fleet        the nodes, their device classes, what they share with the driver          fleet.py, cluster.py
plan         which builds and judges are needed, and what is finished already          plan.py, keys.py
execute      builds in parallel, judges alone, each in an isolated child               execute.py, placement.py, tasks.py
publish      one version of a model, when all its classes have verdicts                publish.py
record       outcomes, and what the campaign comprises                                 ledger.py, campaign_record.py
track        the same in MLflow, where it can be made again from the ledger            tracker_process.py, tracker.py, tracking/
report       the table, and the JSON                                                   report.py
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from freezer.errors import CatalogError, ColdpressError, InfrastructureError, IntegrityError, StoreError
from freezer.limits import SamplingPolicy
from freezer.store import WORK, Store
from pipeline.campaign_record import CampaignRecord, Continued, members_of, planned_members
from pipeline.catalog import Catalog, is_registry, read_catalog, read_registry
from pipeline.cluster import check_address, connect
from pipeline.entry import Entry
from pipeline.events import Display, Event
from pipeline.execute import Executor
from pipeline.fleet import Fleet, assembled
from pipeline.heap import collect_rarely, keep_heap_small
from pipeline.keys import FileDigests
from pipeline.lease import LeaseLostError
from pipeline.ledger import Ledger
from pipeline.materials import Materials
from pipeline.outcome import Outcome
from pipeline.plan import Item, Plan, auto_classes_of, make_plan
from pipeline.publish import Publisher
from pipeline.report import Report
from pipeline.staging import remove_abandoned
from pipeline.tracker import ArtifactMode, Tracker, replay_command
from pipeline.tracker_process import TrackerProcess
from pipeline.tracking.projection import outcomes_digest
from pipeline.workplace import workplace


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All that a campaign is told.

    Attributes:
        catalog: path of the catalog, or `mlflow:` for a whole registry.
        filter_string: of a registry's models, as MLflow takes it.
        trust: whether a registry's pickled models may be loaded.
        store, tracking_uri: where artifacts and records go.
        address: of a Ray cluster; None starts one on this machine.
        campaign: a name; the same name goes on with the same campaign.
        device_classes, recipes: take the place of the entries' own; empty leaves them.
        only: a glob over names of entries.
        keep_going: let good entries run when others are bad.
        lift_quarantine: try again what crashed in earlier campaigns.
        explain: plan, say what would be done and why, and stop. Beside a driver of the campaign too: nothing is locked.
        mlflow_artifacts: whether MLflow holds whole artifacts, or references.
        policy: of sampling.
        wait_s: how long to wait for nodes of a class that has none; None is not at all.
    """

    catalog: str
    store: str
    tracking_uri: str
    campaign: str
    address: str | None = None
    device_classes: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    only: str | None = None
    filter_string: str | None = None
    trust: bool = False
    keep_going: bool = False
    lift_quarantine: bool = False
    explain: bool = False
    mlflow_artifacts: ArtifactMode = "copy"
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    wait_s: float | None = None


class BadEntriesError(CatalogError):
    """Some entries of the catalog are bad, and nothing was started. `problems` has each."""

    def __init__(self, problems: Sequence[CatalogError]) -> None:
        super().__init__(
            f"{len(problems)} bad {'entry' if len(problems) == 1 else 'entries'}; mend them, or run the others with --keep-going",
            code="CP-CATALOG-ENTRIES",
        )
        self.problems = tuple(problems)


def run(config: Config, display: Display) -> Report:
    """Run a campaign to its end, or until it is interrupted.

    Raises:
        CatalogError: the catalog or some entries are bad, and nothing was started.
        UsageError: the address is none that a driver can take.
        InfrastructureError, StoreUnreachableError: Ray or the store cannot be reached at the start.
    """
    started = time.time()
    check_address(config.address)
    keep_heap_small()
    collect_rarely()
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
            plan = _plan(config, entries, fleet, store, ledger, digests, continued.own_since)
            bad = [*_problem_outcomes((*problems, *plan.problems)), *_unplaced_outcomes(plan)]
            if config.explain:
                return _explained(config, plan, bad, display, started)
            executor = Executor(plan, fleet, store, ledger, materials, display.show)
            tracker.may_work = executor.may_disturb
            try:
                campaign = _Campaign(config, plan, executor, store, ledger, tracker, display)
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


def _plan(
    config: Config, entries: Sequence[Entry], fleet: Fleet, store: Store, ledger: Ledger, digests: FileDigests, own_since: float
) -> Plan:
    return make_plan(
        entries,
        fleet.facts(),
        auto=auto_classes_of([node.classes for node in fleet.nodes]),
        device_classes=config.device_classes,
        recipes=config.recipes,
        store=store,
        ledger=ledger,
        digests=digests,
        policy=config.policy,
        keep_going=config.keep_going,
        lift_quarantine=config.lift_quarantine,
        since=own_since,
    )


def _named(config: Config, entries: Sequence[Entry]) -> set[str]:
    """The classes that are asked for by name."""
    return (set(config.device_classes) or {name for entry in entries for name in entry.device_classes}) - {"auto"}


class _Campaign:
    """One campaign under way: outcomes go to the publisher, and what is final to the tracker and the display."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        executor: Executor,
        store: Store,
        ledger: Ledger,
        tracker: Tracker | TrackerProcess,
        display: Display,
    ) -> None:
        self._config, self._plan, self._executor, self._display, self._ledger = config, plan, executor, display, ledger
        self._publisher, self._tracker = Publisher(plan, store, ledger), tracker
        self._final: dict[tuple[str, str], Outcome] = {}
        self._failures: list[str] = []
        self._interrupted = False

    def start(self, problems: Sequence[Outcome], continued: Continued) -> None:
        """Run everything; an interrupt keeps what is finished, a broken store ends the campaign."""
        self._continued = continued
        self._planned = planned_members(self._plan, self._continued)
        self._record(
            CampaignRecord(
                catalog=self._config.catalog,
                started=self._continued.started,
                members=self._planned,
                problems=tuple(problems),
                facts=self._plan.facts,
            )
        )
        self._display.plan(len(self._plan.items), self._executor.num_builds)
        try:
            known = [item.finished for item in self._plan.items if item.finished is not None]
            expected = outcomes_digest(known) if len(known) == len(self._plan.items) else None
            self._tracker.start(self._config.catalog, self._continued.started, expected=expected)
            for item in self._plan.items:
                if item.finished is not None:
                    self._take(item, item.finished)
            for item, outcome in self._executor.outcomes():
                self._take(item, outcome)
        except KeyboardInterrupt:
            self._interrupted = True
        except (StoreError, InfrastructureError, IntegrityError) as error:
            self._failures.append(str(error))

    def _take(self, item: Item, outcome: Outcome) -> None:
        """Take an outcome in; when it was the model's last, publish it, then log it."""
        final = [self._continued.reached(done) for done in self._publisher.add(item, outcome)]
        self._final |= {(done.model, done.device_class): done for done in final}  # they are, whatever becomes of MLflow
        if final:
            self._tracker.log(final)
        for done in final:
            self._display.show(Event(kind="outcome", what=f"{done.model} {done.device_class}", outcome=done))

    def finish(self, problems: Sequence[Outcome], started: float) -> Report:
        """The report, with the ledger's record and MLflow's summary written."""
        planned = {(member.model, member.device_class): member for member in self._planned}
        reached = [self._final[key] for key in planned if key in self._final]
        ended = self._report((*reached, *problems), started, time.time())
        record = CampaignRecord(
            catalog=self._config.catalog,
            started=self._continued.started,
            finished=ended.finished,
            exit_code=replace(ended, infrastructure=tuple(self._failures)).exit_code,  # MLflow can be brought up to date later
            interrupted=self._interrupted,
            members=members_of(reached),
            unreached=tuple(member for key, member in planned.items() if key not in self._final),
            problems=tuple(problems),
            facts=self._plan.facts,
        )
        try:
            self._record(record)
        except LeaseLostError as error:  # MLflow is the other driver's, too
            self._failures = list(dict.fromkeys((*self._failures, str(error))))
            return self._report(ended.outcomes, started, ended.finished)
        except StoreError as error:
            self._failures.append(str(error))
        try:
            self._tracker.finish(ended.outcomes, record.exit_code or 0, interrupted=self._interrupted, finished=ended.finished)
        except KeyboardInterrupt:
            self._interrupted = True
            config = self._config
            again = replay_command(config.tracking_uri, config.campaign, config.store, config.mlflow_artifacts)
            self._failures.append(
                f"interrupted before MLflow was told everything; the store and the ledger are complete, and `{again}` brings it "
                "up to date"
            )
        return self._report(ended.outcomes, started, ended.finished)

    def _record(self, record: CampaignRecord) -> None:
        self._ledger.append("campaign", self._config.campaign, model="", device_class="", data=record.to_json())

    def _report(self, outcomes: Sequence[Outcome], started: float, finished: float) -> Report:
        return Report(
            campaign=self._config.campaign,
            started=started,
            finished=finished,
            outcomes=tuple(outcomes),
            infrastructure=(*self._failures, *self._tracker.failures),
            interrupted=self._interrupted,
        )


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
        failure=failure,
        code=error.code,
        reason=str(error),
        num_threads=0,
        source="",
        source_key="",
        judge_key="",
    )


def _explained(config: Config, plan: Plan, bad: Sequence[Outcome], display: Display, started: float) -> Report:
    """Say of every item what would be done and why; do nothing."""
    for item in plan.items:
        doing = "unchanged" if item.finished else f"build {', '.join(item.missed or item.builds) or 'nothing'}; judge"
        doing += " if it is built" if item.missed else ""
        why = "" if item.why == "unchanged" else f" ({item.why})"
        display.show(Event(kind="note", text=f"{item.entry.name} {item.device_class}: {doing}{why}"))
    for outcome in bad:
        display.show(Event(kind="note", text=f"{outcome.model} {outcome.device_class}: nothing ({outcome.coded_reason})"))
    return Report(campaign=config.campaign, started=started, finished=time.time(), outcomes=())
