"""Execute a plan: builds in parallel, judges alone on their nodes, retries by policy. Yields what became of each item.

Each node builds or judges (placement.py). A judge is given all cores of its node, so Ray runs nothing beside it, of this campaign
or another, and campaigns agree on which nodes are to be judged on (turns.py). The driver itself stands on a node: while a judge
runs there, it publishes nothing, and brings no materials.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from freezer.errors import ColdpressError, InfrastructureError
from pipeline.cluster import Done, Handle, Node
from pipeline.demand import Demand, demand_of
from pipeline.ending import code_of, failure_of
from pipeline.events import Event
from pipeline.fleet import Fleet
from pipeline.ledger import Ledger
from pipeline.materials import Materials
from pipeline.outcome import CandidateReport, Outcome
from pipeline.placement import Queue, Slot, ask_bytes
from pipeline.places import Places
from pipeline.plan import Item, Plan, is_kept
from pipeline.tasks import BuildRequest, BuildResult, JudgeRequest, JudgeResult, build, build_wall_s, candidate_folder, judge

MAX_ATTEMPTS = 3
"""Of a task whose worker or node died."""

IDLE_S = 0.5


@dataclass(kw_only=True)
class _Progress:
    """Where one item stands."""

    item: Item
    index: int
    estimate: Demand
    results: dict[str, BuildResult] = field(default_factory=dict)

    @property
    def built(self) -> bool:
        return len(self.results) == len(self.item.builds)


@dataclass(kw_only=True)
class _Task:
    """A build or judge under way or waiting; see `places.Work`.

    Attributes:
        recipe: None of a judge.
        node: where it was last started.
        avoid: ids of nodes where it failed.
        memory_bytes: that it needs by experience; None is as its entry says.
    """

    progress: _Progress
    recipe: str | None
    attempts: int = 0
    node: Node | None = None
    avoid: set[str] = field(default_factory=set)
    memory_bytes: int | None = None

    @property
    def device_class(self) -> str:
        return self.progress.item.device_class

    @property
    def least_cpus(self) -> int:
        """A judge needs a core for each thread; a build makes do with one."""
        item = self.progress.item
        return 1 if self.recipe else max(item.num_threads, *item.further_threads, 1)

    @property
    def index(self) -> int:
        return self.progress.index

    @property
    def demand(self) -> Demand:
        if self.memory_bytes is None:
            return self.progress.estimate
        return demand_of(self.progress.item.entry, self.memory_bytes)

    @property
    def what(self) -> str:
        return _label(self.progress.item, self.recipe)


def _label(item: Item, recipe: str | None) -> str:
    """`model class recipe`, as people are shown a build; of a judge without a recipe."""
    return " ".join(word for word in (item.entry.name, item.device_class, recipe) if word)


class Executor:
    """Runs the builds and judges of a plan.

    Args:
        plan: of the campaign.
        fleet: to run on.
        store: path of the store.
        ledger: where finished builds are looked up and kept.
        materials: bring an entry's model to the workers, just before it is built.
        show: takes the events.
    """

    def __init__(
        self, plan: Plan, fleet: Fleet, store: str, ledger: Ledger, materials: Materials, show: Callable[[Event], None]
    ) -> None:
        self._fleet, self._store, self._ledger, self._materials, self._show = fleet, store, ledger, materials, show
        self._waiting: Queue[_Task] = Queue()
        self._ready: Queue[_Task] = Queue()
        self._running: dict[Handle, _Task] = {}
        self._hopeless: deque[tuple[Item, Outcome]] = deque()
        self._places: Places[_Task] = Places(fleet, self._waiting, self._ready, show)
        for index, item in enumerate(plan.items):
            if item.finished is None:
                self._enqueue(item, index)
        self.num_builds = len(self._waiting)

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Each item's outcome, as it is reached; not published yet. Stopping the iteration stops everything that runs."""
        cluster = self._fleet.cluster
        try:
            while self._waiting or self._ready or self._running or self._hopeless:
                self._start()
                while self._hopeless and not self._places.judges_here():
                    yield self._hopeless.popleft()
                for done in cluster.wait(list(self._running), timeout_s=0.5) if self._running else ():
                    self._places.leave(self._running[done.handle], done)
                    found = self._ended(done)
                    if found is not None:
                        self._hopeless.append(found)
                if (self._waiting or self._ready) and not self._running:
                    time.sleep(IDLE_S)  # until a node comes, or another campaign's turn is over
        finally:
            self._places.close()
            cluster.cancel(list(self._running))

    def _enqueue(self, item: Item, index: int) -> None:
        progress = _Progress(item=item, index=index, estimate=demand_of(item.entry))
        for recipe, key in item.builds.items():
            known = self._known(key.digest, recipe)
            if known is not None:
                progress.results[recipe] = known
            else:
                self._waiting.append(_Task(progress=progress, recipe=recipe))
        if progress.built:
            self._when_built(progress)

    def _known(self, key: str, recipe: str) -> BuildResult | None:
        """A build that is finished: a candidate in the store, or a failure that only another key can mend."""
        row = self._ledger.find("build", key)
        # What this campaign has built before it was stopped is its own work; so is what no driver came to write a row of.
        own_s = row.data["wall_s"] if row is not None and row.campaign == self._ledger.campaign else 0.0
        if candidate_folder(self._store, key).is_dir():
            wall_s = build_wall_s(self._store, key) if row is None else own_s
            return BuildResult(key=key, recipe=recipe, cached=True, wall_s=wall_s)
        if row is None or row.data["failure"] is None or not is_kept(row.data["failure"], row.data.get("code")):
            return None
        return BuildResult(
            key=key,
            recipe=recipe,
            cached=True,
            failure=row.data["failure"],
            code=row.data.get("code"),
            message=row.data["message"],
            log_tail=row.data["log_tail"],
            wall_s=own_s,
        )

    def _start(self) -> None:
        """Start what may run now."""
        self._places.tick()
        if self._fleet.blind:
            self._materials.ship_from_now_on()
        for task, failure, code, why in self._places.given_up():
            self._end(task, failure, code, why)
        for slot, task in self._places.judges(self._may_bring):
            self._start_judge(task, slot)
        for slot, task in self._places.builds(self._may_bring):
            self._start_build(task, slot)

    def _may_bring(self, task: _Task) -> bool:
        """Whether a task's materials may be brought now: that is work, which would disturb a judge where the driver stands."""
        return not self._places.judges_here() or self._materials.is_ready(task.progress.item.entry)

    def _end(self, task: _Task, failure: str, code: str, why: str) -> None:
        """End a task that was not started: a build of its item, or the whole item."""
        item, results = task.progress.item, task.progress.results
        if task.recipe is not None:
            key = item.builds[task.recipe].digest
            result = BuildResult(key=key, recipe=task.recipe, failure=failure, code=code, message=why)
            self._keep_build(task.progress, task.recipe, result)
            return
        judged = JudgeResult(key=item.judge.digest, verdict="failed", reason=why, failure=failure, code=code)
        self._hopeless.append((item, outcome_of(item, judged, results)))

    def _start_build(self, task: _Task, slot: Slot) -> None:
        item, recipe = task.progress.item, str(task.recipe)
        try:
            entry = self._materials.ready(item.entry)
        except ColdpressError as error:
            self._end(task, failure_of(error), code_of(error), str(error))
            return
        request = BuildRequest(
            key=item.builds[recipe].digest,
            entry=entry,
            recipe=recipe,
            device_class=item.device_class,
            num_threads=item.num_threads,
            store=self._store,
            further_threads=item.further_threads,
        )
        self._show(Event(kind="build", what=task.what))
        self._places.enter(task, slot)
        handle = self._fleet.cluster.start(
            build,
            request,
            name=f"build {task.what}",
            device_class_=item.device_class,
            node=slot.node,
            memory_bytes=ask_bytes(demand_of(entry, task.memory_bytes), slot.node),
        )
        self._running[handle] = task

    def _start_judge(self, task: _Task, slot: Slot) -> None:
        item = task.progress.item
        try:
            entry = self._materials.ready(item.entry)
        except ColdpressError as error:
            self._end(task, failure_of(error), code_of(error), str(error))
            return
        request = JudgeRequest(
            key=item.judge.digest,
            entry=entry,
            builds={r: result.key for r, result in task.progress.results.items() if result.failure is None},
            device_class=item.device_class,
            num_threads=item.num_threads,
            further_threads=item.further_threads,
            policy=item.policy,
            campaign=self._ledger.campaign,
            store=self._store,
            failures={r: result.message for r, result in task.progress.results.items() if result.failure is not None},
        )
        self._show(Event(kind="judge", what=task.what))
        self._places.enter(task, slot)
        name = f"judge {task.what}"
        handle = self._fleet.cluster.start_alone(judge, request, name=name, device_class_=item.device_class, node=slot.node)
        self._running[handle] = task

    def _ended(self, done: Done) -> tuple[Item, Outcome] | None:
        """Take in a task that ended; an outcome when it was the item's last."""
        task = self._running.pop(done.handle)
        task.attempts += 1
        if done.failure is not None and task.attempts < MAX_ATTEMPTS:
            self._show(Event(kind="note", text=f"{task.what}: {done.failure}; attempt {task.attempts + 1} of {MAX_ATTEMPTS}"))
            (self._waiting if task.recipe else self._ready).appendleft(task)
            return None
        if task.recipe is not None:
            self._build_ended(task, done)
            return None
        item = task.progress.item
        result = done.value
        if done.failure is not None:
            result = JudgeResult(
                key=item.judge.digest,
                verdict="failed",
                reason=done.failure,
                failure="infrastructure",
                code=InfrastructureError.code,
            )
        self._show(Event(kind="judged", what=task.what, text=f"{result.verdict} in {result.judge_s:.1f} s"))
        return item, outcome_of(item, result, task.progress.results)

    def _build_ended(self, task: _Task, done: Done) -> None:
        progress, recipe = task.progress, str(task.recipe)
        result: BuildResult = done.value
        if done.failure is not None:
            key = progress.item.builds[recipe].digest
            failed = InfrastructureError(done.failure)
            result = BuildResult(key=key, recipe=recipe, failure="infrastructure", code=failed.code, message=str(failed))
        self._keep_build(progress, recipe, result)

    def _keep_build(self, progress: _Progress, recipe: str, result: BuildResult) -> None:
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
            },
        )
        text = f"failed: {result.failure}: {result.message}" if result.failure else f"in {result.wall_s:.1f} s"
        self._show(Event(kind="built", what=_label(progress.item, recipe), text=text))
        if progress.built:
            self._when_built(progress)

    def _when_built(self, progress: _Progress) -> None:
        if any(result.failure is None for result in progress.results.values()):
            self._ready.append(_Task(progress=progress, recipe=None))
        else:
            self._hopeless.append((progress.item, failed_outcome(progress.item, progress.results)))


def outcome_of(item: Item, result: JudgeResult, builds: dict[str, BuildResult]) -> Outcome:
    """The outcome that a judge's result makes, before it is published."""
    judged = {report.recipe for report in result.candidates}
    candidates = (*result.candidates, *(_report(found) for recipe, found in builds.items() if recipe not in judged))
    return Outcome(
        **_identity(item),
        verdict=result.verdict,
        reason=result.reason,
        recipe=result.recipe,
        failure=result.failure,
        code=result.code,
        log_tail=result.log_tail,
        speedup=result.speedup,
        speedup_ci=result.speedup_ci,
        drift=result.drift,
        latency_ms=result.latency_ms,
        task_metric=result.task_metric,
        build_s=sum(found.wall_s for found in builds.values()),
        judge_s=result.judge_s,
        candidates=candidates,
        host=result.host or {},
    )


def failed_outcome(item: Item, builds: dict[str, BuildResult]) -> Outcome:
    """The outcome of an item of which nothing was built: failed, or kept-eager where nothing but eager was asked for."""
    if not builds:
        reason = "no other recipe than eager was asked for that fits this class"
        return Outcome(**_identity(item), verdict="kept-eager", reason=reason)
    first = next(iter(builds.values()))
    recipes: dict[str, list[str]] = {}
    for recipe, found in builds.items():
        recipes.setdefault(found.message, []).append(recipe)
    reason = "; ".join(
        message if len(names) == len(builds) else f"{', '.join(names)}: {message}" for message, names in recipes.items()
    )
    return Outcome(
        **_identity(item),
        verdict="failed",
        failure=first.failure,
        code=first.code,
        reason=reason,
        log_tail=first.log_tail,
        build_s=sum(found.wall_s for found in builds.values()),
        candidates=tuple(_report(found) for found in builds.values()),
    )


def _identity(item: Item) -> dict[str, Any]:
    return {
        "model": item.entry.name,
        "device_class": item.device_class,
        "num_threads": item.num_threads,
        "source": str(item.entry.source),
        "registered_name": item.entry.registered_name,
        "tags": dict(item.entry.tags),
        "source_key": item.source.digest,
        "judge_key": item.judge.digest,
    }


def _report(result: BuildResult) -> CandidateReport:
    """Of a build that was not judged: it failed, or the judge did."""
    return CandidateReport(
        recipe=result.recipe, build_key=result.key, problem=result.message or None, failure=result.failure, build_s=result.wall_s
    )
