"""Execute a plan: builds in parallel, judges alone on their nodes, retries by policy. Yields what became of each item.

Each node builds or judges (queue.py). A judge reserves all cores of its node, so Ray runs nothing next to it, and campaigns agree
on which nodes judge (cluster/coordination.py). While a judge runs on the driver's own node, the driver publishes nothing and
transfers no sources.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from freezer.errors import ColdpressError
from freezer.hardware.device_classes import PORTABLE, device_class
from freezer.store.store import Store
from pipeline.catalog.entry import Entry
from pipeline.cluster.nodes import Done, Handle
from pipeline.failures.classify import code_of, failure_of
from pipeline.failures.policy import attempts_left, decide, is_kept, memory_for_next
from pipeline.ledger.ledger import Ledger
from pipeline.planning.item import Item, Plan
from pipeline.planning.keys import pinned
from pipeline.planning.memory_estimate import demand_of, learned
from pipeline.planning.reuse import found_meanwhile
from pipeline.records.events import Event
from pipeline.records.outcome import Outcome
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.outcomes import failed_outcome, outcome_of
from pipeline.scheduling.queue import Queue, ask_bytes
from pipeline.scheduling.scheduler import Places
from pipeline.scheduling.slots import Slot
from pipeline.scheduling.work import ItemProgress, Task, TaskFailure, failure_in, final_message, task_label
from pipeline.sources.materials import Materials
from pipeline.worker.requests import BuildRequest, BuildResult, JudgeRequest, JudgeResult
from pipeline.worker.tasks import build, judge
from pipeline.workspace.layout import build_wall_s
from pipeline.workspace.workspace import workplace

IDLE_S = 1.0
"""Between two looks at what may be started while nothing ends."""


class Executor:
    """Runs the builds and judges of a plan.

    Args:
        plan: of the campaign.
        fleet: to run on.
        store: that holds the candidates.
        ledger: where finished builds are looked up and kept.
        materials: bring an entry's model to the workers, just before it is built.
        show: takes the events.
    """

    def __init__(
        self, plan: Plan, fleet: Fleet, store: Store, ledger: Ledger, materials: Materials, show: Callable[[Event], None]
    ) -> None:
        self._fleet, self._store, self._ledger, self._materials, self._show = fleet, store, ledger, materials, show
        self._place = workplace(store.uri)
        self._waiting: Queue[Task] = Queue()
        self._ready: Queue[Task] = Queue()
        self._running: dict[Handle, Task] = {}
        self._due: deque[tuple[Item, Outcome]] = deque()
        self._lifted = plan.lift_quarantine
        self._classes = {item.device_class for item in plan.items}
        self._places: Places[Task] = Places(fleet, self._waiting, self._ready, show)
        for index, item in enumerate(plan.items):
            if item.finished is None:
                self._enqueue(item, index)
        self.num_builds = len(self._waiting)

    def may_disturb(self) -> bool:
        """Whether no judge runs where the driver stands, of this campaign or another; asked from other threads too."""
        return not self._places.judges_here()

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Each item's outcome, as it is reached; not published yet. Stopping the iteration stops everything that runs."""
        cluster = self._fleet.cluster
        try:
            while self._waiting or self._ready or self._running or self._due:
                while self._due and self.may_disturb():  # before the next judge starts where the driver stands
                    yield self._due.popleft()
                    self._places.turns.tick()  # it may be another campaign's by now
                self._start()
                goes_on = self._running or (self._due and self.may_disturb())
                if not goes_on and (self._waiting or self._ready or self._due):
                    time.sleep(IDLE_S)  # until a node comes, or another campaign's turn is over
                for done in cluster.wait(list(self._running), timeout_s=IDLE_S) if self._running else ():
                    self._places.leave(self._running[done.handle], done)
                    found = self._ended(done)
                    if found is not None:
                        self._due.append(found)
        finally:
            self._places.close()
            cluster.cancel(list(self._running))

    def _enqueue(self, item: Item, index: int) -> None:
        before = self._ledger.nearest("build", item.entry.name, item.device_class)  # of other weights, perhaps
        used_bytes = 0 if before is None else before.data.get("peak_bytes", 0)
        progress = ItemProgress(item=item, index=index, estimate=learned(demand_of(item.entry), used_bytes))
        for recipe, key in item.builds.items():
            known = self._known(item, key.digest, recipe)
            if known is not None:
                progress.results[recipe] = known
            else:
                self._waiting.append(Task(progress=progress, recipe=recipe))
        if progress.built:
            self._when_built(progress)

    def _known(self, item: Item, key: str, recipe: str) -> BuildResult | None:
        """A build that is finished: a candidate in the store, or a failure that only another key can mend."""
        row = self._ledger.find("build", key)
        # What this campaign has built before it was stopped is its own work; so is what no driver came to write a row of.
        own_s = row.data["wall_s"] if row is not None and row.campaign == self._ledger.campaign else 0.0
        if self._place.had("candidates", key):
            wall_s = build_wall_s(self._store.uri, key) if row is None else own_s
            return BuildResult(key=key, recipe=recipe, cached=True, wall_s=wall_s)
        if row is None or row.data["failure"] is None:
            return None
        failure, code, tried_bytes = row.data["failure"], row.data.get("code"), row.data.get("tried_bytes")
        if not is_kept(failure, code, tried_bytes=tried_bytes, memory_bytes=item.memory_bytes, lifted=self._lifted):
            return None
        return BuildResult(
            key=key,
            recipe=recipe,
            cached=True,
            failure=failure,
            code=code,
            message=row.data["message"],
            log_tail=row.data["log_tail"],
            wall_s=own_s,
            tried_bytes=tried_bytes,
        )

    def _start(self) -> None:
        """Start what may run now."""
        self._places.tick()
        if self._fleet.blind:
            self._materials.ship_from_now_on()
        for task, failure, code, why in self._places.given_up():
            self._end(task, failure, code, why)
        here: list[tuple[Slot, Task]] = []
        for slot, task in self._places.judges(self._may_bring):
            if slot.node.node_id == self._fleet.cluster.home:
                here.append((slot, task))
            else:
                self._start_judge(task, slot)
        for slot, task in self._places.builds(self._may_bring):  # while their materials may still be brought
            self._start_build(task, slot)
        for slot, task in here:
            self._start_judge(task, slot)

    def _may_bring(self, task: Task) -> bool:
        """Whether a task's materials may be brought now: that is work, which would disturb a judge where the driver stands."""
        return self.may_disturb() or self._materials.is_ready(task.progress.item.entry)

    def _ready_entry(self, task: Task) -> Entry:
        """A task's entry, its model brought to where workers find it; of one that was fetched the size is known now.

        What was planned for is pinned: artifacts of two classes, built hours apart, must not be of two files.
        """
        item = task.progress.item
        entry = self._materials.ready(item.entry)
        entry = replace(entry, source=pinned(entry.source, item.source))
        found = demand_of(entry)
        if found.asked > task.progress.estimate.asked:
            task.progress.estimate = found
            self._places.check_again()
        return entry

    def _end(self, task: Task, failure: str, code: str, why: str) -> None:
        """End a task that was not started: a build of its item, or the whole item."""
        item, results = task.progress.item, task.progress.results
        if task.recipe is not None:
            key = item.builds[task.recipe].digest
            result = BuildResult(key=key, recipe=task.recipe, failure=failure, code=code, message=why)
            self._keep_build(task.progress, task.recipe, result)
            return
        judged = JudgeResult(key=item.judge.digest, verdict="failed", reason=why, failure=failure, code=code)
        self._due.append(self._reached(item, outcome_of(item, judged, results)))

    def _start_build(self, task: Task, slot: Slot) -> None:
        item, recipe = task.progress.item, str(task.recipe)
        try:
            entry = self._ready_entry(task)
        except ColdpressError as error:
            self._end(task, failure_of(error), code_of(error), str(error))
            return
        request = BuildRequest(
            key=item.builds[recipe].digest,
            entry=self._materials.travelling(entry),
            recipe=recipe,
            device_class=item.device_class,
            num_threads=item.num_threads,
            store=self._store.uri,
            further_threads=item.further_threads,
        )
        self._show(Event(kind="build", what=task.what))
        self._places.enter(task, slot)
        handle = self._fleet.cluster.start(
            build,
            request,
            name=f"build {task.what}",
            device_class_=self._limits_of(item, slot),
            node=slot.node,
            memory_bytes=ask_bytes(task.demand, slot.node),
        )
        self._running[handle] = task

    def _start_judge(self, task: Task, slot: Slot) -> None:
        item = task.progress.item
        found = found_meanwhile(item, self._store, self._ledger, lifted=self._lifted)
        if found is not None:
            self._due.append((item, found))
            return
        try:
            entry = self._ready_entry(task)
        except ColdpressError as error:
            self._end(task, failure_of(error), code_of(error), str(error))
            return
        request = JudgeRequest(
            key=item.judge.digest,
            entry=self._materials.travelling(entry),
            builds={r: result.key for r, result in task.progress.results.items() if result.failure is None},
            device_class=item.device_class,
            num_threads=item.num_threads,
            further_threads=item.further_threads,
            policy=item.policy,
            campaign=self._ledger.campaign,
            store=self._store.uri,
            failures={r: result.message for r, result in task.progress.results.items() if result.failure is not None},
        )
        self._show(Event(kind="judge", what=task.what))
        self._places.enter(task, slot)
        name = f"judge {task.what}"
        limits_of = self._limits_of(item, slot)
        memory_bytes = ask_bytes(task.demand, slot.node)
        handle = self._fleet.cluster.start_alone(
            judge, request, name=name, device_class_=limits_of, node=slot.node, memory_bytes=memory_bytes
        )
        self._running[handle] = task

    def _limits_of(self, item: Item, slot: Slot) -> str:
        """The class under whose limits a task runs; what is portable runs in a worker that another class has warmed."""
        if item.device_class != PORTABLE:
            return item.device_class
        warm = (name for name in slot.node.classes if name in self._classes and device_class(name).kind == "cpu")
        return next(warm, PORTABLE)

    def _ended(self, done: Done) -> tuple[Item, Outcome] | None:
        """Take in a task that ended; an outcome when it was the item's last."""
        task = self._running.pop(done.handle)
        failed = failure_in(done, task.node)
        if failed is not None:
            task.failures.append(failed.kind)
            try_again = self._build_again if decide(failed.kind, failed.code).rebuild else self._try_again
            if try_again(task, failed):
                return None
        if task.recipe is not None:
            self._build_ended(task, done, failed)
            return None
        item = task.progress.item
        result: JudgeResult = done.value
        if failed is not None:
            result = done.value or JudgeResult(key=item.judge.digest, verdict="failed", reason="", judge_s=0.0)
            reason = final_message(failed, task)
            result = replace(result, reason=reason, failure=failed.failure, code=failed.code, tried_bytes=failed.tried_bytes)
        self._show(Event(kind="judged", what=task.what, text=f"in {result.judge_s:.1f} s"))  # the outcome is in no ledger yet
        return self._reached(item, outcome_of(item, result, task.progress.results))

    def _reached(self, item: Item, outcome: Outcome) -> tuple[Item, Outcome]:
        """An item with its outcome; what was found before stands where judging again came to nothing."""
        if item.before is None or outcome.verdict not in ("failed", "unstable"):
            return item, outcome
        text = f"{task_label(item, None)}: judged again in vain ({outcome.coded_reason}); what was found before stands"
        self._show(Event(kind="note", text=text))
        return item, item.before

    def _build_again(self, task: Task, failed: TaskFailure) -> bool:
        """Queue the builds whose candidates a judge has found damaged and removed, if the policy has another attempt for it."""
        progress = task.progress
        progress.damages.append(failed.kind)
        if not attempts_left(progress.damages, failed.kind, failed.code):
            return False
        found = {name: result.key for name, result in progress.results.items() if result.failure is None}
        gone = [name for name, key in found.items() if not self._place.has("candidates", key)]
        if not gone:
            return False
        self._show(Event(kind="note", text=f"{task.what}: {failed.message}; {', '.join(gone)} built again"))
        for name in gone:
            del progress.results[name]
            self._waiting.append(Task(progress=progress, recipe=name))
        return True

    def _try_again(self, task: Task, failed: TaskFailure) -> bool:
        """Queue a failed task for another attempt, if the policy has one for it."""
        left = attempts_left(task.failures, failed.kind, failed.code)
        if not left:
            return False
        decision, how = decide(failed.kind, failed.code), ""
        if decision.elsewhere and failed.node_id is not None:
            task.avoid.add(failed.node_id)
            how = ", on another node if there is one"
        if decision.more_memory:
            used = max(failed.peak_bytes, failed.tried_bytes or 0)  # 0 where Ray has killed the worker, which tells nothing
            task.memory_bytes = memory_for_next(task.demand.asked, used)
            how = f", with {task.memory_bytes / 1e9:.1f} GB kept free"
        number = len(task.failures) + 1
        text = f"{task.what}: {failed.failure}: {failed.message}; attempt {number} of {number - 1 + left}{how}"
        self._show(Event(kind="note", text=text))
        queue = self._waiting if task.recipe else self._ready
        (queue.append if decision.later else queue.appendleft)(task)
        self._places.check_again()
        task.node = None
        return True

    def _build_ended(self, task: Task, done: Done, failed: TaskFailure | None) -> None:
        progress, recipe = task.progress, str(task.recipe)
        result: BuildResult = done.value
        if failed is not None:
            result = done.value or BuildResult(key=progress.item.builds[recipe].digest, recipe=recipe)
            result = replace(result, failure=failed.failure, code=failed.code, message=final_message(failed, task))
        progress.estimate = learned(progress.estimate, result.peak_bytes)
        self._keep_build(progress, recipe, result)

    def _keep_build(self, progress: ItemProgress, recipe: str, result: BuildResult) -> None:
        """Take a finished build in: into the ledger, onto the display; and the item goes on when it was the last."""
        progress.results[recipe] = result
        self._ledger.append(
            "build",
            result.key,
            model=progress.item.entry.name,
            device_class=progress.item.device_class,
            data={
                "recipe": recipe,
                "failure": result.failure,
                "code": result.code,
                "message": result.message,
                "log_tail": result.log_tail,
                "wall_s": result.wall_s,
                "peak_bytes": result.peak_bytes,
                "tried_bytes": result.tried_bytes,
                "starts": self._num_starts(progress.item, result),
            },
        )
        text = f"failed: {result.failure}: {result.message}" if result.failure else f"in {result.wall_s:.1f} s"
        self._show(Event(kind="built", what=task_label(progress.item, recipe), text=text))
        if progress.built:
            self._when_built(progress)

    def _num_starts(self, item: Item, result: BuildResult) -> int:
        """In how many starts of campaigns a build has failed, with this one; 0 of one that did not."""
        row = self._ledger.find("build", result.key, model=item.entry.name)
        before = row.data.get("starts", 1) if row is not None and row.data["failure"] else 0
        return before + 1 if result.failure else 0

    def _when_built(self, progress: ItemProgress) -> None:
        """Have an item judged; where what was missed is not built now either, what was found without it stands."""
        item = progress.item
        if item.before is not None and all(progress.results[recipe].failure is not None for recipe in item.missed):
            self._due.append((item, item.before))
        elif any(result.failure is None for result in progress.results.values()):
            self._ready.append(Task(progress=progress, recipe=None))
        else:
            self._due.append((progress.item, failed_outcome(progress.item, progress.results)))
