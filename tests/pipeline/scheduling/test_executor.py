"""The order in which a plan is executed, with tasks that end when they are waited for."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import SourceError
from freezer.freezing.models import load_source
from freezer.freezing.sources import parse_source
from freezer.spec import Limits
from freezer.store import Store
from pipeline.cluster import Done, Handle, Node
from pipeline.ledger import Ledger
from pipeline.planning import Item, Plan
from pipeline.records import Event, Failure, Outcome
from pipeline.scheduling import Executor
from pipeline.worker import BuildRequest, BuildResult, JudgeRequest, JudgeResult
from pipeline.workspace import machine_time, workplace
from tests.support.campaigns import entry, plan_of
from tests.support.executions import materials_of
from tests.support.one_node import NoRay, OneNode
from tests.support.steps import HERE

HOME = Node(node_id="home", num_cpus=2, classes=("portable",))
ROOMY = replace(HOME, memory_bytes=64 * 10**9)


Request = BuildRequest | JudgeRequest


class Workers(NoRay):
    """Does every task when it is waited for, one at a time, and notes what was started where."""

    def __init__(self, damaged: Sequence[str] = ()) -> None:
        super().__init__()
        self.home = HOME.node_id
        self.said: list[str] = []
        self.asked: list[tuple[Request, int | None]] = []
        self.shown: list[Event] = []
        self._damaged = list(damaged)
        self._tasks: dict[Handle, Request] = {}

    def start(  # type: ignore[override]
        self, _: Any, request: Request, *, node: Node, memory_bytes: int | None = None, **__: object
    ) -> Handle:
        kind = "build" if isinstance(request, BuildRequest) else "judge"
        self.said.append(f"{kind} {request.entry.name} {node.node_id}")
        self.asked.append((request, memory_bytes))
        handle = len(self.said)
        self._tasks[handle] = request
        return handle

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        request = self._tasks[handles[0]]
        if isinstance(request, BuildRequest):
            for key in request.builds.values():
                workplace(request.store).folder("candidates", key).mkdir(
                    parents=True, exist_ok=True
                )
            value = tuple(
                BuildResult(key=key, recipe=recipe) for recipe, key in request.builds.items()
            )
            return [Done(handle=handles[0], value=value)]
        result = JudgeResult(verdict="rejected", reason="as it is")
        if request.entry.name in self._damaged:
            self._damaged.remove(request.entry.name)
            for key in request.builds.values():
                shutil.rmtree(
                    workplace(request.store).folder("candidates", key), ignore_errors=True
                )
            result = JudgeResult.of_failure(
                Failure(kind="disk", code="CP-INTEGRITY", message="a byte is wrong")
            )
        return [Done(handle=handles[0], value=(result,))]

    def cancel(self, handles: Sequence[Handle], *, grace_s: float = 5.0) -> None:
        assert not handles


def planned(store: Store, ledger: Ledger, names: str) -> Plan:
    entries = [entry(name, store.root.parent) for name in names]
    return plan_of(entries, store, ledger, device_classes=("portable",), classes=("portable",))


def outcomes(
    plan: Plan,
    store: Store,
    ledger: Ledger,
    workers: Workers,
    nodes: Sequence[Node],
) -> Iterator[tuple[Item, Outcome]]:
    """Each outcome, as it is handed out to be published; that is noted too."""
    fleet = OneNode(workers, store.root, *nodes)
    executor = Executor(plan, fleet, store, ledger, materials_of(store), workers.shown.append)
    for item, outcome in executor.outcomes():
        with machine_time.lock_file("compute") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a judge would
        workers.said.append(f"outcome {item.entry.name}")
        yield item, outcome


def built(plan: Plan, store: Store, names: str, device_class: str | None = None) -> None:
    """Have the candidates of some models in the store."""
    for item in plan.items:
        if item.entry.name in names and device_class in (None, item.device_class):
            for key in item.builds.values():
                workplace(str(store.root)).folder("candidates", key.digest).mkdir(parents=True)


def test_judges_start_before_builds(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "abcd")
    workers = Workers()
    built(plan, store, "cd")
    assert len(list(outcomes(plan, store, ledger, workers, [HOME]))) == 4
    assert workers.said[:2] == ["judge c home", "build a home"]
    assert workers.said.index("judge d home") < workers.said.index("build b home")


def test_damaged_candidate_fails_until_the_next_start(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "a")
    workers = Workers(damaged="a")
    ((_, outcome),) = outcomes(plan, store, ledger, workers, [HOME])
    assert outcome.failure is not None
    assert outcome.failure.code == "CP-INTEGRITY"
    again = planned(store, ledger, "a")
    ((_, outcome),) = outcomes(again, store, ledger, workers, [HOME])
    assert outcome.verdict == "rejected"
    assert workers.said == ["build a home", "judge a home", "outcome a"] * 2


class Disturbed(Workers):
    """Judges of `a` are disturbed at first."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        request, (done,) = self._tasks[handles[0]], super().wait(handles, timeout_s)
        if isinstance(request, JudgeRequest) and request.entry.name == "a" and self._times:
            self._times -= 1
            [result] = done.value
            unstable = replace(result, verdict="unstable", reason="too busy")
            return [replace(done, value=(unstable,))]
        return [done]


def test_disturbed_judge_is_repeated_after_the_others(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "abc")
    workers = Disturbed(times=2)
    built(plan, store, "abc")
    found = {
        item.entry.name: outcome for item, outcome in outcomes(plan, store, ledger, workers, [HOME])
    }
    assert workers.said == [
        "judge a home",
        "judge b home",
        "outcome b",
        "judge c home",
        "outcome c",
        "judge a home",
        "judge a home",
        "outcome a",
    ]
    assert (found["a"].verdict, found["a"].reason) == ("rejected", "as it is")


def test_third_disturbed_judge_is_final(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "a")
    workers = Disturbed(times=5)
    built(plan, store, "a")
    ((_, outcome),) = outcomes(plan, store, ledger, workers, [HOME])
    assert workers.said == [*["judge a home"] * 3, "outcome a"]
    assert (outcome.verdict, outcome.failure) == ("unstable", None)
    assert "--accept-noise" in str(outcome.reason)


def test_measured_memory_is_requested_later(store: Store, ledger: Ledger) -> None:
    class Large(Workers):
        def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
            (done,) = super().wait(handles, timeout_s)
            if isinstance(done.value[0], JudgeResult):
                return [done]
            return [
                replace(
                    done, value=tuple(replace(built, peak_bytes=20 * 10**9) for built in done.value)
                )
            ]

    workers = Large()
    for recipe in ("portable", "torchscript-frozen"):
        plan = plan_of(
            [entry("a", store.root.parent)],
            store,
            ledger,
            recipes=(recipe,),
            device_classes=("portable",),
        )
        list(outcomes(plan, store, ledger, workers, [ROOMY]))
    (first, asked_first), *others = workers.asked
    assert (type(first), asked_first) == (BuildRequest, 10**9)
    assert isinstance(others[0][0], JudgeRequest)
    assert {memory_bytes for _, memory_bytes in others} == {32 * 10**9}
    assert len(others) > 1


@pytest.mark.parametrize("last", ["portable", HERE])
def test_each_class_has_its_own_limits(last: str, store: Store, ledger: Ledger) -> None:
    """Portable's are the defaults for speed; both share what is prepared for an entry."""
    own = entry("a", store.root.parent, limits=Limits(speedup_min=0.01))
    plan = plan_of([own], store, ledger, device_classes=(HERE, "portable"))
    materials, limits = materials_of(store), {HERE: own.limits, "portable": Limits()}
    for item in sorted(plan.items, key=lambda item: item.device_class == last):
        sent = materials.as_sent(materials.ready(item.entry))
        assert sent.limits == limits[item.device_class]


def test_file_changed_after_planning_is_rejected(
    store: Store, ledger: Ledger, tmp_path: Path
) -> None:
    model = tmp_path / "model.pt"
    workers = Workers()
    model.write_bytes(b"as it was planned")
    made = replace(
        entry("a", store.root.parent), source=parse_source(f"torchscript:{model}", folder=tmp_path)
    )
    plan = plan_of([made], store, ledger, device_classes=("portable",), classes=("portable",))
    model.write_bytes(b"as it is now")
    assert len(list(outcomes(plan, store, ledger, workers, [HOME]))) == 1
    assert len(workers.asked) == 2
    for request, _ in workers.asked:
        with pytest.raises(SourceError) as caught:
            load_source(request.entry.source)
        assert caught.value.code == "CP-FETCH-DIGEST"
