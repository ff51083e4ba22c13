"""Execute a plan: start tasks, wait for them, report what happened to the state machine, and
do what it asks for.

What is built, retried and judged is decided in item_state.py; where and when a task runs, in
scheduler.py. While a judge measures on the driver's own machine, the driver waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from freezer.errors import ColdpressError
from freezer.hardware import PORTABLE, device_class
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.cluster import Done, Handle, Node
from pipeline.failures import NODE_MEMORY, classify, coded_failure
from pipeline.ledger import Ledger
from pipeline.planning import UNUSUAL, Item, Plan, demand_of, pinned
from pipeline.records import BuildResult, Event, Failure
from pipeline.scheduling.architectures import PortableChecks
from pipeline.scheduling.build_records import BuildRecords
from pipeline.scheduling.fleet import Fleet, Show
from pipeline.scheduling.item_state import (
    Step,
    TaskFailure,
    end_build,
    end_judge,
)
from pipeline.scheduling.outcomes import Decided
from pipeline.scheduling.queue import Progress, Slot, Task, memory_to_reserve
from pipeline.scheduling.scheduler import Scheduler
from pipeline.sources import Materials
from pipeline.worker import BuildRequest, JudgeRequest, JudgeResult, build, judge
from pipeline.workspace import computing, log_place

IDLE_S = 1.0
"""Interval between two checks for tasks that can start while none ends."""


class Executor:
    """Runs the builds and judges of a plan.

    Args:
        plan: plan of the campaign.
        fleet: nodes to run on.
        store: store of the candidates.
        ledger: ledger of the finished builds and outcomes.
        materials: bring the source of an entry to the workers, just before it is built.
        show: takes the events.

    Attributes:
        begun: progress of the items that are not finished when the campaign starts, by label.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        store: Store,
        ledger: Ledger,
        materials: Materials,
        show: Show,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._ledger = ledger
        self._materials = materials
        self._show = show
        self._records = BuildRecords(store, ledger, lifted=plan.lift_quarantine)
        self._scheduler = Scheduler(fleet)
        self._checks = PortableChecks(fleet, store.uri, show)
        self._running: dict[Handle, Sequence[Task]] = {}
        self._decided: deque[Decided] = deque()
        self._classes = {item.device_class for item in plan.items}
        self.begun: dict[str, Progress] = {}
        of_cpu = dict[tuple[str, int], Progress]()
        for index, item in enumerate(plan.items):
            if item.finished is None:
                step = self._records.start(item)
                progress = Progress(index=index, state=step.state)
                place = item.entry.name, item.num_threads
                if item.device_class == PORTABLE:  # the last class of each model
                    progress.beside = of_cpu.get(place)
                elif device_class(item.device_class).kind == "cpu":
                    of_cpu[place] = progress
                self._follow(progress, step)
                self.begun[item.label()] = progress

    def outcomes(self) -> Iterator[Decided]:
        """Yield the outcome of each item, not published yet; no judge measures here meanwhile.

        Closing the iterator cancels everything that runs.
        """
        cluster = self._fleet.cluster
        scheduler = self._scheduler
        try:
            while True:
                while self._decided:
                    with computing():
                        yield self._decided.popleft()
                if not (scheduler.num_waiting or self._handles or self._decided):
                    return
                scheduler.tick()
                if self._fleet.blind:
                    self._materials.ship_from_now_on()
                for task, failure in scheduler.given_up():
                    self._give_up(task, failure)
                for slot, tasks in scheduler.next_tasks():
                    self._start(tasks, slot)
                if self._handles:
                    for done in cluster.wait(self._handles, timeout_s=IDLE_S):
                        self._end(done)
                elif not self._decided:
                    time.sleep(IDLE_S)  # until a node joins
        finally:
            cluster.cancel(self._handles)

    @property
    def _handles(self) -> list[Handle]:
        return [*self._running, *self._checks.handles]

    def _follow(self, progress: Progress, step: Step) -> None:
        """Take the next state of an item, and do what the step asks for."""
        state = progress.state = step.state
        item = state.item
        result = step.result
        if result is not None:
            self._records.add(item, result)
            text = f"in {result.wall_s:.1f} s"
            if result.failure:
                log = log_place(self._store.uri, result.key)
                text = f"failed ({result.failure.kind}) {result.failure.code}; log: {log}"
            self._show(
                Event(
                    kind="built",
                    what=item.label(),
                    recipes=(result.recipe,),
                    text=text,
                    seconds=result.wall_s,
                )
            )
        for text in step.notes:
            self._show(Event(kind="note", text=text))
        for recipe in step.queue:
            self._scheduler.add(
                Task(
                    progress=progress,
                    recipe=recipe,
                ),
                first=step.first,
            )
        if state.outcome is not None:
            self._records.speeds.add(state.outcome)
            outcome = self._records.counted(item, state.outcome)
            if not self._checks.start(item, outcome):
                self._decided.append((item, outcome))

    def _start(self, tasks: Sequence[Task], slot: Slot) -> None:
        """Start a group of builds, or one judge, unless its source cannot be brought."""
        task = tasks[0]
        progress, item = task.progress, task.item
        try:
            entry = self._materials.ready(item.entry)
        except ColdpressError as error:
            for task in tasks:
                self._give_up(task, classify(error))
            return
        entry = replace(entry, source=pinned(entry.source, item.source))  # as it was planned
        progress.state = progress.state.with_files(demand_of(entry))
        entry = self._materials.as_sent(entry)
        kind: Literal["build", "judge"] = "build" if task.recipe else "judge"
        for each in tasks:
            recipes = (each.recipe,) if each.recipe else ()
            self._show(Event(kind=kind, what=each.item.label(), recipes=recipes))
        self._scheduler.record_start(tasks, slot)
        request = (
            self._build_request(tasks, entry) if task.recipe else self._judge_request(tasks, entry)
        )
        handle = self._fleet.cluster.start(
            build if task.recipe else judge,
            request,
            name=f"{kind} {item.label(', '.join(each.recipe for each in tasks if each.recipe))}",
            class_name=self._limits_of(item, slot.node),
            node=slot.node,
            memory_bytes=memory_to_reserve(task.demand, slot.node),
        )
        self._running[handle] = tasks

    def _build_request(self, tasks: Sequence[Task], entry: Entry) -> BuildRequest:
        item = tasks[0].item
        recipes = [(task.item, task.recipe) for task in tasks if task.recipe]
        return BuildRequest(
            entry=entry,
            builds={recipe: of.builds[recipe].digest for of, recipe in recipes},
            device_class=item.device_class,
            threads=item.threads,
            store=self._store.uri,
            source=item.source.digest,
        )

    def _judge_request(self, tasks: Sequence[Task], entry: Entry) -> JudgeRequest:
        """The request of a judge, and of that of `portable` beside it."""
        task, *others = tasks
        beside = None
        if others:
            limits, objective = others[0].item.entry.limits, others[0].item.entry.objective
            beside = self._judge_request(others, replace(entry, limits=limits, objective=objective))
        item, state = task.item, task.progress.state
        contest = None if state.needs_contest else self._records.speeds.contest(item)
        inherits = contest is not None and set(state.built) <= set(contest.recipes)
        return JudgeRequest(
            key=item.judge.digest,
            entry=entry,
            builds={recipe: result.key for recipe, result in state.built.items()},
            device_class=item.device_class,
            threads=item.threads,
            inherits=inherits,
            confirms=inherits and not self._scheduler.num_waiting,
            drift_max=UNUSUAL * max(1.0, contest.error_ratio) if contest else math.inf,
            policy=item.policy,
            campaign=self._ledger.campaign,
            store=self._store.uri,
            source=item.source.digest,
            failures={
                name: result.problem for name, result in state.results.items() if result.failure
            },
            beside=beside,
        )

    def _limits_of(self, item: Item, node: Node) -> str:
        """Return the class under whose limits a task runs; a portable task uses a worker that
        another class has warmed up.
        """
        if item.device_class == PORTABLE:
            for name in node.classes:
                if name in self._classes and device_class(name).kind == "cpu":
                    return name
        return item.device_class

    def _give_up(self, task: Task, failure: Failure) -> None:
        """End a task that cannot be started."""
        state = task.progress.state
        if task.recipe is None:
            self._follow(task.progress, end_judge(state, JudgeResult.of_failure(failure)))
            return
        built = BuildResult(
            key=task.item.builds[task.recipe].digest,
            recipe=task.recipe,
            failure=failure,
        )
        self._follow(task.progress, end_build(state, built))

    def _end(self, done: Done) -> None:
        """Report a check, a group of builds, or one judge, that ended."""
        if done.handle in self._checks.handles:
            self._decided += self._checks.end(done)
            return
        tasks = self._running.pop(done.handle)
        self._scheduler.record_end(tasks[0], done)
        if tasks[0].recipe is None:
            lost = JudgeResult(verdict="failed", reason="")
            for task, judged in zip(tasks, done.value or [lost] * len(tasks), strict=True):
                self._judge_ended(task, done, judged)
            return
        built: dict[str, BuildResult] = {result.recipe: result for result in done.value or ()}
        for task in tasks:
            assert task.recipe is not None
            lost_build = BuildResult(key=task.item.builds[task.recipe].digest, recipe=task.recipe)
            self._build_ended(task, done, built.get(task.recipe, lost_build))

    def _build_ended(self, task: Task, done: Done, built: BuildResult) -> None:
        progress, item = task.progress, task.item
        failed = _failure_in(task, done, built)
        hopeless = self._records.speeds.hopeless(item, built.architecture)
        self._follow(progress, end_build(progress.state, built, failed, hopeless))
        if built.recipe not in progress.state.results:
            self._show(
                Event(
                    kind="retried",
                    what=item.label(),
                    recipes=(built.recipe,),
                )
            )

    def _judge_ended(
        self,
        task: Task,
        done: Done,
        judged: JudgeResult,
    ) -> None:
        progress = task.progress
        self._follow(progress, end_judge(progress.state, judged, _failure_in(task, done, judged)))
        for recipe in judged.left_out:
            self._records.add(task.item, progress.state.results[recipe])
        self._show(
            Event(
                kind="retried" if progress.state.outcome is None else "judged",
                what=task.item.label(),
                recipes=tuple(report.recipe for report in judged.candidates),
                text=f"in {judged.judge_s:.1f} s",
                seconds=judged.judge_s,
                unstable=judged.verdict == "unstable",
            )
        )


def _failure_in(task: Task, done: Done, result: BuildResult | JudgeResult) -> TaskFailure | None:
    """Return why a build or judge failed; None if it succeeded.

    Its own result counts if Ray reports no failure.
    """
    failure = result.failure
    if done.failure is not None:
        failed = done.kind
        if failed == "node-memory":
            failure = Failure(kind="memory", code=NODE_MEMORY, message=done.failure)
        else:
            failure = coded_failure("disk" if failed == "disk" else "infrastructure", done.failure)
    elif isinstance(result, JudgeResult) and result.verdict == "unstable":
        failed = "noise" if task.item.policy.accept_noise else "unstable"
        failure = Failure(kind=failed, message=result.reason)
    elif failure is not None:
        failed = failure.kind
    else:
        return None
    assert task.node is not None, "it was started"
    return TaskFailure(
        kind=failed,
        failure=failure,
        node_id=task.node.node_id,
        peak_bytes=result.peak_bytes,
    )
