"""Execute a plan: start tasks, wait for them, report what happened to the state machine, and perform its actions.

What is built, retried and judged is decided in item_state.py; where and when a task runs, in scheduler.py. A judge reserves all
cores of its node. While a judge runs on the driver's own node, the driver publishes nothing and transfers no sources.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from freezer.errors import ColdpressError
from freezer.hardware.device_classes import PORTABLE, device_class
from freezer.store.store import Store
from pipeline.catalog.entry import Entry
from pipeline.cluster.nodes import Done, Handle
from pipeline.failures.classify import classify
from pipeline.failures.policy import decide
from pipeline.ledger.ledger import Ledger
from pipeline.planning.keys import pinned
from pipeline.planning.memory_estimate import demand_of
from pipeline.planning.plan import FinishedWork, Item, Plan
from pipeline.records.events import Event
from pipeline.records.outcome import Failure, Outcome
from pipeline.scheduling.build_records import BuildRecords
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.item_state import (
    BuildEnded,
    Decide,
    DemandKnown,
    ItemEvent,
    ItemState,
    JudgeEnded,
    JudgeStarted,
    OutcomeKnown,
    Phase,
    QueueTask,
    RecordBuild,
    ShowNote,
    Start,
    advance,
)
from pipeline.scheduling.queue import Queue, ask_bytes
from pipeline.scheduling.scheduler import Places
from pipeline.scheduling.slots import Slot
from pipeline.scheduling.work import Progress, Task, failure_in
from pipeline.sources.materials import Materials
from pipeline.worker.requests import BuildRequest, BuildResult, JudgeRequest, JudgeResult
from pipeline.worker.tasks import build, judge

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
        num_builds: builds queued at the start.
    """

    def __init__(
        self, plan: Plan, fleet: Fleet, store: Store, ledger: Ledger, materials: Materials, show: Callable[[Event], None]
    ) -> None:
        self._fleet, self._store, self._ledger, self._materials, self._show = fleet, store, ledger, materials, show
        self._lifted = plan.lift_quarantine
        self._records = BuildRecords(store, ledger, lifted=plan.lift_quarantine)
        self._waiting: Queue[Task] = Queue()
        self._ready: Queue[Task] = Queue()
        self._running: dict[Handle, Task] = {}
        self._due: deque[tuple[Item, Outcome]] = deque()
        self._classes = {item.device_class for item in plan.items}
        self._places: Places[Task] = Places(fleet, self._waiting, self._ready, show)
        for index, item in enumerate(plan.items):
            if item.finished is None:
                state = ItemState(item=item, estimate=self._records.estimate(item))
                self._advance(Progress(index=index, state=state), Start(finished=self._records.finished(item)))
        self.num_builds = len(self._waiting)

    def may_disturb(self) -> bool:
        """Whether no judge of any campaign runs on the driver's node. Thread-safe."""
        return not self._places.judges_here()

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Yield the outcome of each item, not published yet. Closing the iterator cancels everything that runs."""
        cluster = self._fleet.cluster
        try:
            while self._waiting or self._ready or self._running or self._due:
                while self._due and self.may_disturb():  # before the next judge starts on the driver's node
                    yield self._due.popleft()
                    self._places.turns.tick()  # another campaign may have claimed the node meanwhile
                self._start_tasks()
                goes_on = self._running or (self._due and self.may_disturb())
                if not goes_on and (self._waiting or self._ready or self._due):
                    time.sleep(IDLE_S)  # until a node joins, or another campaign's turn ends
                for done in cluster.wait(list(self._running), timeout_s=IDLE_S) if self._running else ():
                    task = self._running.pop(done.handle)
                    self._places.leave(task, done)
                    self._ended(task, done)
        finally:
            self._places.close()
            cluster.cancel(list(self._running))

    def _advance(self, progress: Progress, event: ItemEvent) -> None:
        """Report an event to the state machine of an item, and perform its actions."""
        progress.state, actions = advance(progress.state, event)
        for action in actions:
            match action:
                case QueueTask(recipe=recipe):
                    queue = self._waiting if recipe else self._ready
                    (queue.appendleft if action.first else queue.append)(Task(progress=progress, recipe=recipe))
                    if action.attempt > 1:
                        self._places.check_again()
                case RecordBuild(result=result):
                    self._records.add(progress.item, result)
                    failure = result.failure
                    text = f"failed: {failure.kind}: {failure.message}" if failure else f"in {result.wall_s:.1f} s"
                    self._show(Event(kind="built", what=progress.item.label(result.recipe), text=text))
                case ShowNote(text=text):
                    self._show(Event(kind="note", text=text))
                case Decide(outcome=outcome):
                    self._due.append((progress.item, outcome))

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
                self._start_judge(task, slot)
        for slot, task in self._places.builds(self._may_bring):  # before a judge here forbids to transfer sources
            self._start_task(task, slot, self._build_request)
        for slot, task in here:
            self._start_judge(task, slot)

    def _may_bring(self, task: Task) -> bool:
        """Whether the sources of a task may be transferred now, which would disturb a judge on the driver's node."""
        return self.may_disturb() or self._materials.is_ready(task.progress.item.entry)

    def _start_judge(self, task: Task, slot: Slot) -> None:
        found = FinishedWork(self._store, self._ledger, lifted=self._lifted).found_meanwhile(task.progress.item)
        if found is not None:
            self._advance(task.progress, OutcomeKnown(outcome=found))
        else:
            self._start_task(task, slot, self._judge_request)

    def _start_task(self, task: Task, slot: Slot, request_for: Callable[[Task, Entry], BuildRequest | JudgeRequest]) -> None:
        try:
            entry = self._ready_entry(task)
        except ColdpressError as error:
            self._give_up(task, classify(error))
            return
        request = request_for(task, self._materials.travelling(entry))
        cluster = self._fleet.cluster
        kind: Literal["build", "judge"] = "build" if task.recipe else "judge"
        start, function = (cluster.start, build) if task.recipe else (cluster.start_alone, judge)
        self._show(Event(kind=kind, what=task.label))
        self._places.enter(task, slot)
        if task.recipe is None:
            self._advance(task.progress, JudgeStarted())
        handle = start(
            function,
            request,
            name=f"{kind} {task.label}",
            device_class_=self._limits_of(task.progress.item, slot),
            node=slot.node,
            memory_bytes=ask_bytes(task.demand, slot.node),
        )
        self._running[handle] = task

    def _ready_entry(self, task: Task) -> Entry:
        """Return the entry of a task once workers can load it, with the source pinned to the file that was planned."""
        item = task.progress.item
        entry = self._materials.ready(item.entry)
        entry = replace(entry, source=pinned(entry.source, item.source))
        before = task.progress.state
        self._advance(task.progress, DemandKnown(demand=demand_of(entry)))
        if task.progress.state is not before:
            self._places.check_again()
        return entry

    def _build_request(self, task: Task, entry: Entry) -> BuildRequest:
        item, recipe = task.progress.item, str(task.recipe)
        return BuildRequest(
            key=item.builds[recipe].digest,
            entry=entry,
            recipe=recipe,
            device_class=item.device_class,
            num_threads=item.num_threads,
            store=self._store.uri,
            further_threads=item.further_threads,
        )

    def _judge_request(self, task: Task, entry: Entry) -> JudgeRequest:
        item, results = task.progress.item, task.progress.state.results
        return JudgeRequest(
            key=item.judge.digest,
            entry=entry,
            builds={recipe: result.key for recipe, result in results.items() if result.failure is None},
            device_class=item.device_class,
            num_threads=item.num_threads,
            further_threads=item.further_threads,
            policy=item.policy,
            campaign=self._ledger.campaign,
            store=self._store.uri,
            failures={recipe: result.failure.message for recipe, result in results.items() if result.failure is not None},
        )

    def _limits_of(self, item: Item, slot: Slot) -> str:
        """The class under whose limits a task runs; a portable task uses a worker that another class has warmed up."""
        if item.device_class != PORTABLE:
            return item.device_class
        warm = (name for name in slot.node.classes if name in self._classes and device_class(name).kind == "cpu")
        return next(warm, PORTABLE)

    def _give_up(self, task: Task, failure: Failure) -> None:
        """End a task that cannot be started."""
        item = task.progress.item
        if task.recipe is not None:
            built = BuildResult(key=item.builds[task.recipe].digest, recipe=task.recipe, failure=failure)
            self._advance(task.progress, BuildEnded(result=built))
        else:
            self._advance(task.progress, JudgeEnded(result=JudgeResult.of_failure(item.judge.digest, failure)))

    def _ended(self, task: Task, done: Done) -> None:
        """Report a task that ended to the state machine."""
        progress, failed = task.progress, failure_in(done, task.node)
        if task.recipe is not None:
            built = done.value or BuildResult(key=progress.item.builds[task.recipe].digest, recipe=task.recipe)
            self._advance(progress, BuildEnded(result=built, failed=failed))
            return
        judged = done.value or JudgeResult(key=progress.item.judge.digest, verdict="failed", reason="")
        damaged = failed is not None and decide(failed.kind, failed.failure.code).rebuild
        gone = self._records.removed(progress.state.results) if damaged else ()
        self._advance(progress, JudgeEnded(result=judged, failed=failed, gone=gone))
        if progress.state.phase == Phase.DECIDED:
            self._show(Event(kind="judged", what=task.label, text=f"in {judged.judge_s:.1f} s"))
