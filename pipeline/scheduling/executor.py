"""Execute a plan: start tasks, wait for them, report what happened to the state machine, and
perform its actions.

What is built, retried and judged is decided in item_state.py; where and when a task runs, in
scheduler.py. A judge reserves all cores of its node. While a judge runs on the driver's own node,
the driver publishes nothing and transfers no sources.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from freezer.errors import ColdpressError, IntegrityError
from freezer.hardware import PORTABLE, device_class
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.cluster import Done, Handle
from pipeline.failures import CODES, NODE_MEMORY, classify, decide, is_kept
from pipeline.ledger import Ledger
from pipeline.planning import (
    Demand,
    EarlierSpeeds,
    FinishedWork,
    Item,
    Plan,
    demand_of,
    learned,
    pinned,
)
from pipeline.records import Event, Failure, FinishedBuild, Outcome
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.item_state import (
    BuildEnded,
    Decide,
    DemandKnown,
    ItemEvent,
    ItemState,
    JudgeEnded,
    OutcomeKnown,
    QueueTask,
    RecordBuild,
    ShowNote,
    Start,
    TaskFailure,
    advance,
)
from pipeline.scheduling.queue import Progress, Slot, Task, ask_bytes
from pipeline.scheduling.scheduler import Places
from pipeline.sources import Materials
from pipeline.worker import BuildRequest, BuildResult, JudgeRequest, JudgeResult, build, judge
from pipeline.workspace import build_wall_s, log_place, workplace

IDLE_S = 1.0
"""Interval between two checks for tasks that can start while none ends."""


class Executor:
    """Runs the builds and judges of a plan.

    Args:
        plan: of the campaign.
        fleet: to run on.
        store: that holds the candidates.
        ledger: that holds finished builds and outcomes.
        materials: bring the source of an entry to the workers, just before it is built.
        show: takes the events.

    Attributes:
        begun: the items that are not finished, as they start, by label.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        store: Store,
        ledger: Ledger,
        materials: Materials,
        show: Callable[[Event], None],
    ) -> None:
        self._fleet, self._store, self._ledger, self._materials, self._show = (
            fleet,
            store,
            ledger,
            materials,
            show,
        )
        self._lifted = plan.lift_quarantine
        self._records = BuildRecords(store, ledger, lifted=plan.lift_quarantine)
        self._places = Places(fleet, show)
        self._running: dict[Handle, Sequence[Task]] = {}
        self._due: deque[tuple[Item, Outcome]] = deque()
        self._classes = {item.device_class for item in plan.items}
        self.begun: dict[str, ItemState] = {}
        for index, item in enumerate(plan.items):
            if item.finished is None:
                progress = Progress(
                    index=index, state=ItemState(item=item, estimate=self._records.estimate(item))
                )
                self._advance(progress, self._records.start_of(item))
                self.begun[item.label()] = progress.state

    def may_disturb(self) -> bool:
        """Whether no judge of any campaign runs on the driver's node. Thread-safe."""
        return not self._places.judges_here()

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Yield the outcome of each item, not published yet.

        Closing the iterator cancels everything that runs.
        """
        cluster = self._fleet.cluster
        try:
            while self._places.waiting or self._places.ready or self._running or self._due:
                while (
                    self._due and self.may_disturb()
                ):  # before the next judge starts on the driver's node
                    yield self._due.popleft()
                    # another campaign may have claimed the node meanwhile
                    self._places.turns.tick()
                self._start_tasks()
                goes_on = self._running or (self._due and self.may_disturb())
                if not goes_on and (self._places.waiting or self._places.ready or self._due):
                    time.sleep(IDLE_S)  # until a node joins, or another campaign's turn ends
                for done in (
                    cluster.wait(list(self._running), timeout_s=IDLE_S) if self._running else ()
                ):
                    tasks = self._running.pop(done.handle)
                    self._places.leave(tasks, done)
                    self._ended(tasks, done)
        finally:
            self._places.turns.close()
            cluster.cancel(list(self._running))

    def _advance(self, progress: Progress, event: ItemEvent) -> None:
        """Report an event to the state machine of an item, and perform its actions."""
        progress.state, actions = advance(progress.state, event)
        item = progress.state.item
        for action in actions:
            match action:
                case QueueTask(recipe=recipe):
                    queue = self._places.waiting if recipe else self._places.ready
                    (queue.appendleft if action.first else queue.append)(
                        Task(progress=progress, recipe=recipe)
                    )
                case RecordBuild(result=result):
                    self._records.add(item, result)
                    failure = result.failure
                    log = log_place(self._store.uri, result.key)
                    text = (
                        f"failed ({failure.kind}) {failure.code}; log: {log}"
                        if failure
                        else f"in {result.wall_s:.1f} s"
                    )
                    recipes = (result.recipe,)
                    self._show(
                        Event(
                            kind="built",
                            what=item.label(),
                            recipes=recipes,
                            text=text,
                            seconds=result.wall_s,
                        )
                    )
                case ShowNote(text=text):
                    self._show(Event(kind="note", text=text))
                case Decide(outcome=outcome):
                    self._records.speeds.add(outcome)
                    self._due.append((item, outcome))

    def _start_tasks(self) -> None:
        """Start the tasks that may run now."""
        self._places.tick()
        if self._fleet.blind:
            self._materials.ship_from_now_on()
        for task, failure in self._places.given_up():
            self._give_up(task, failure)
        here: list[tuple[Slot, Task]] = []
        for slot, task in self._places.judges(self._may_bring):
            if slot.node.node_id == self._fleet.cluster.home:
                here.append((slot, task))
            else:
                self._start([task], slot)
        for slot, tasks in self._places.builds(
            self._may_bring
        ):  # before a judge here forbids to transfer sources
            self._start(tasks, slot)
        for slot, task in here:
            self._start([task], slot)

    def _may_bring(self, task: Task) -> bool:
        """Whether the sources of a task may be transferred now, which would disturb a judge on the
        driver's node.
        """
        return self.may_disturb() or self._materials.is_ready(task.item.entry)

    def _start(self, tasks: Sequence[Task], slot: Slot) -> None:
        """Start a group of builds, or one judge, unless its source cannot be brought, or another
        campaign has reached the outcome meanwhile.
        """
        task = tasks[0]
        item, cluster = task.item, self._fleet.cluster
        if task.recipe is None:
            found = FinishedWork(self._store, self._ledger, lifted=self._lifted).found_meanwhile(
                item
            )
            if found is not None:
                self._advance(task.progress, OutcomeKnown(outcome=found))
                return
        try:
            entry = self._materials.ready(item.entry)
        except ColdpressError as error:
            for task in tasks:
                self._give_up(task, classify(error))
            return
        entry = replace(
            entry, source=pinned(entry.source, item.source)
        )  # the file that was planned
        self._advance(task.progress, DemandKnown(demand=demand_of(entry)))
        entry = self._materials.travelling(entry)
        recipes = [task.recipe for task in tasks if task.recipe]
        self._show(
            Event(kind="build" if recipes else "judge", what=item.label(), recipes=tuple(recipes))
        )
        self._places.enter(tasks, slot)
        state = task.progress.state
        handle = cluster.start(
            build if recipes else judge,
            self._build_request(state, recipes, entry)
            if recipes
            else self._judge_request(state, entry),
            name=f"{'build' if recipes else 'judge'} {item.label(', '.join(recipes))}",
            device_class_=self._limits_of(item, slot),
            node=slot.node,
            num_cpus=1 if recipes else slot.node.num_cpus,  # a judge runs alone
            memory_bytes=ask_bytes(task.demand, slot.node),
        )
        self._running[handle] = tasks

    def _build_request(
        self, state: ItemState, recipes: Sequence[str], entry: Entry
    ) -> BuildRequest:
        item = state.item
        return BuildRequest(
            entry=entry,
            builds={recipe: item.builds[recipe].digest for recipe in recipes},
            spent_s=sum(result.wall_s for result in state.results.values()),
            device_class=item.device_class,
            num_threads=item.num_threads,
            store=self._store.uri,
        )

    def _judge_request(self, state: ItemState, entry: Entry) -> JudgeRequest:
        item, results = state.item, state.results
        return JudgeRequest(
            key=item.judge.digest,
            entry=entry,
            builds={
                recipe: result.key for recipe, result in results.items() if result.failure is None
            },
            device_class=item.device_class,
            num_threads=item.num_threads,
            further_threads=item.further_threads,
            policy=item.policy,
            campaign=self._ledger.campaign,
            store=self._store.uri,
            failures={
                recipe: result.failure.message
                for recipe, result in results.items()
                if result.failure is not None
            },
        )

    def _limits_of(self, item: Item, slot: Slot) -> str:
        """The class under whose limits a task runs; a portable task uses a worker that another
        class has warmed up.
        """
        if item.device_class != PORTABLE:
            return item.device_class
        warm = (
            name
            for name in slot.node.classes
            if name in self._classes and device_class(name).kind == "cpu"
        )
        return next(warm, PORTABLE)

    def _give_up(self, task: Task, failure: Failure) -> None:
        """End a task that cannot be started."""
        item = task.item
        if task.recipe is not None:
            built = BuildResult(
                key=item.builds[task.recipe].digest, recipe=task.recipe, failure=failure
            )
            self._advance(task.progress, BuildEnded(result=built))
        else:
            self._advance(
                task.progress, JudgeEnded(result=JudgeResult.of_failure(item.judge.digest, failure))
            )

    def _ended(self, tasks: Sequence[Task], done: Done) -> None:
        """Report a group of builds, or one judge, that ended to the state machine."""
        task = tasks[0]
        progress, item = task.progress, task.item
        if task.recipe is not None:
            builds = [
                BuildResult(key=item.builds[task.recipe].digest, recipe=task.recipe)
                for task in tasks
                if task.recipe
            ]
            for built in done.value or builds:
                hopeless = self._records.speeds.hopeless(item, built.architecture)
                self._advance(
                    progress,
                    BuildEnded(
                        result=built, failed=_failure_in(task, done, built), hopeless=hopeless
                    ),
                )
                if built.recipe not in progress.state.results:
                    self._show(Event(kind="retried", what=item.label(), recipes=(built.recipe,)))
            return
        judged = done.value or JudgeResult(key=item.judge.digest, verdict="failed", reason="")
        failed = _failure_in(task, done, judged)
        damaged = failed is not None and decide(failed.kind, failed.failure.code).rebuild
        gone = self._records.removed(progress.state.results) if damaged else ()
        self._advance(progress, JudgeEnded(result=judged, failed=failed, gone=gone))
        unstable = failed is not None and failed.kind == "unstable"
        if progress.state.outcome is None:
            self._show(Event(kind="retried", what=item.label(), unstable=unstable))
        else:
            text, seconds = f"in {judged.judge_s:.1f} s", judged.judge_s
            self._show(
                Event(
                    kind="judged", what=item.label(), text=text, seconds=seconds, unstable=unstable
                )
            )


def _failure_in(task: Task, done: Done, result: BuildResult | JudgeResult) -> TaskFailure | None:
    """Return why a build or judge failed; None if it succeeded.

    Its own result counts if Ray reports no failure.
    """
    node_id = task.node.node_id if task.node else None
    if done.failure is not None:
        kind = {"node-memory": "memory", "disk": "disk"}.get(done.kind, "infrastructure")
        code = NODE_MEMORY if kind == "memory" else CODES[kind]
        return TaskFailure(
            kind=done.kind,
            failure=Failure(kind=kind, code=code, message=done.failure),
            node_id=node_id,
        )
    if isinstance(result, JudgeResult) and result.verdict == "unstable":
        return TaskFailure(
            kind="unstable",
            failure=Failure(kind="unstable", message=result.reason),
            node_id=node_id,
        )
    if result.failure is None:
        return None
    is_damage = task.recipe is None and result.failure.code == IntegrityError.code
    kind = "damage" if is_damage else result.failure.kind
    return TaskFailure(
        kind=kind, failure=result.failure, node_id=node_id, peak_bytes=result.peak_bytes
    )


class BuildRecords:
    """Results of builds in the ledger and the store: finds what earlier campaigns finished, and
    appends what this one adds.

    Args:
        store, ledger: of the campaign.
        lifted: whether quarantined builds are retried.
    """

    def __init__(self, store: Store, ledger: Ledger, *, lifted: bool) -> None:
        self._store, self._ledger, self._lifted = store, ledger, lifted
        self._place = workplace(store.uri)
        self.speeds = EarlierSpeeds(ledger)

    def estimate(self, item: Item) -> Demand:
        """Return the memory estimate of an item: of its files, or the peak of its last build,
        possibly with other weights.
        """
        row = self._ledger.nearest("build", item.entry.name, item.device_class)
        return learned(
            demand_of(item.entry),
            0 if row is None else FinishedBuild.from_json(row.data).peak_bytes,
        )

    def start_of(self, item: Item) -> Start:
        """Return how an item starts: what need not be built, and whether one build decides what
        else need not be.
        """
        finished = self.finished(item)
        architecture = next(
            (result.architecture for result in finished.values() if result.architecture), ""
        )
        if architecture or not item.optional:
            return Start(finished=finished, hopeless=self.speeds.hopeless(item, architecture))
        return Start(finished=finished, one_first=self.speeds.any_for(item))

    def finished(self, item: Item) -> dict[str, BuildResult]:
        """Return the builds of an item that need not run, by recipe."""
        found = {
            recipe: self._finished(item, recipe, key.digest) for recipe, key in item.builds.items()
        }
        return {recipe: result for recipe, result in found.items() if result is not None}

    def _finished(self, item: Item, recipe: str, key: str) -> BuildResult | None:
        """Return a candidate in the store, or a failure that only another key can fix."""
        row = self._ledger.find("build", key)
        known = None if row is None else FinishedBuild.from_json(row.data)
        # A candidate that this campaign built before it was stopped, or whose row no driver wrote,
        # counts as this campaign's work.
        own_s = known.wall_s if known and row and row.campaign == self._ledger.campaign else 0.0
        architecture = known.architecture if known else ""
        if self._place.is_listed("candidates", key):
            wall_s = build_wall_s(self._store.uri, key) if known is None else own_s
            return BuildResult(
                key=key, recipe=recipe, cached=True, wall_s=wall_s, architecture=architecture
            )
        if known is None or known.failure is None:
            return None
        if not is_kept(known.failure, memory_bytes=item.memory_bytes, lifted=self._lifted):
            return None
        return BuildResult(
            key=key,
            recipe=recipe,
            cached=True,
            failure=known.failure,
            wall_s=own_s,
            architecture=architecture,
        )

    def removed(self, results: Mapping[str, BuildResult]) -> tuple[str, ...]:
        """Return the recipes whose candidate was built and is no longer in the store."""
        built = {recipe: result.key for recipe, result in results.items() if result.failure is None}
        return tuple(
            recipe for recipe, key in built.items() if not self._place.has("candidates", key)
        )

    def add(self, item: Item, result: BuildResult) -> None:
        """Append a result to the ledger, with the number of campaign starts in which the build
        failed.
        """
        row = self._ledger.find("build", result.key, model=item.entry.name)
        before = None if row is None else FinishedBuild.from_json(row.data)
        failed_before = before.starts if before and before.failure else 0
        self._ledger.append(
            "build",
            result.key,
            model=item.entry.name,
            device_class=item.device_class,
            data=FinishedBuild(
                recipe=result.recipe,
                failure=result.failure,
                wall_s=result.wall_s,
                peak_bytes=result.peak_bytes,
                starts=failed_before + 1 if result.failure else 0,
                architecture=result.architecture,
            ).to_json(),
        )
