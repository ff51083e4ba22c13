"""Kinds of failures, the retry policy, and that docs/guides/operate.md shows the same table."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray.exceptions

from freezer.errors import (
    BuildError,
    CaptureError,
    FreezeError,
    InfrastructureError,
    JudgeError,
    LeakError,
    SourceError,
    SpecError,
)
from freezer.spec import Limits
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.failures import CODES, attempts_left, classify, decide, kind_of_ray, policy
from pipeline.failures.policy import BY_CODE, MOST_ATTEMPTS, POLICY, RAY, Decision
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from pipeline.records import ClassFacts, Failure
from pipeline.worker import BuildResult
from tests.support import campaigns
from tests.support.campaigns import entry
from tests.support.executions import executed, record

FACTS = ClassFacts(num_threads=2, toolchain={"torch": "2.13.0"}, memory_bytes=10 * 10**9)


def test_every_kind_has_a_row() -> None:
    assert set(CODES) <= set(POLICY)
    assert {
        error.kind
        for error in (FreezeError, SourceError, CaptureError, BuildError, LeakError, JudgeError)
    } <= set(POLICY)
    assert set(RAY.values()) <= set(POLICY)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ray.exceptions.WorkerCrashedError(), "worker"),
        (ray.exceptions.NodeDiedError("x"), "node"),
        (ray.exceptions.OutOfMemoryError("x"), "node-memory"),
        (ray.exceptions.OwnerDiedError("00" * 28, None, ""), "infrastructure"),
        (ray.exceptions.RaySystemError("x"), "infrastructure"),
        (ray.exceptions.TaskUnschedulableError("x"), "node"),
    ],
)
def test_exceptions_of_ray_have_kinds(error: Exception, kind: str) -> None:
    assert kind_of_ray(error) == kind


def test_attempts_are_limited() -> None:
    assert [attempts_left(["node"] * n, "node") for n in (1, 2, 3, 4)] == [2, 1, 0, 0]
    assert attempts_left(["crash"], "crash") == 1
    assert attempts_left(["crash", "node", "crash"], "crash") == 0
    assert attempts_left(["crash", "node"], "node") == 2, "a dead node does not count as a crash"
    assert attempts_left(["node", "worker", "disk", "node"], "node") == 1
    assert attempts_left(["node", "worker", "disk", "node", "worker"], "worker") == 0, (
        f"{MOST_ATTEMPTS} in all"
    )
    assert attempts_left(["capture"], "capture") == 0
    assert attempts_left(["memory"], "memory", "CP-MEMORY") == 0, "the limit of the entry is final"
    assert attempts_left(["memory"], "memory", "CP-MEMORY-NODE") == 1
    assert decide("no such kind") == Decision()


def is_kept(failure: Failure | None, **given: Any) -> bool:
    return policy.is_kept(
        failure, **{"memory_bytes": None, "timeout_s": 60, "lifted": False, **given}
    )


def test_failures_that_the_next_campaign_keeps() -> None:
    assert is_kept(None), "rejected"
    assert is_kept(Failure(kind="capture", code="CP-CAPTURE"))
    assert not is_kept(Failure(kind="source", code="CP-FETCH"))
    assert not any(is_kept(Failure(kind=kind)) for kind in ("error", "disk", "infrastructure"))
    assert is_kept(Failure(kind="crash", code="CP-CRASH"))
    assert not is_kept(Failure(kind="crash", code="CP-CRASH"), lifted=True)
    assert is_kept(Failure(kind="capture", code="CP-CAPTURE"), lifted=True), (
        "only crashes and hangs are in quarantine"
    )
    assert is_kept(Failure(kind="memory", code="CP-MEMORY", tried_bytes=5), memory_bytes=5)
    assert not is_kept(Failure(kind="memory", code="CP-MEMORY", tried_bytes=5), memory_bytes=6)
    assert not is_kept(
        Failure(kind="memory", code="CP-MEMORY", tried_bytes=None), memory_bytes=6
    ), "of an earlier release"


def test_same_time_limit_is_exceeded_twice() -> None:
    once = Failure(kind="timeout", code="CP-TIMEOUT", tried_s=60)
    twice = once.counted(once)
    assert [is_kept(once), is_kept(twice)] == [False, True]
    assert not is_kept(twice, timeout_s=61)
    assert not is_kept(twice, lifted=True)
    assert not is_kept(replace(twice, tried_s=None)), "of an earlier release"
    assert once.counted(replace(once, tried_s=30)).starts == 1, "that was another limit"


TITLE = "| failure | attempts | where and how | next campaign |"


def _row(name: str, decision: Decision) -> list[str]:
    words = [
        *(["another node"] if decision.elsewhere else []),
        *(["twice the memory"] if decision.more_memory else []),
        *(["after what else waits"] if decision.later else []),
    ]
    return [name, str(decision.attempts), ", ".join(words), decision.kept]


def test_operate_page_has_the_same_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / "operate.md").read_text()
    lines = text[text.index(TITLE) :].split("\n\n")[0].splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = [[re.findall(r"`([^`]+)`", cells[0]), *cells[1:4]] for cells in found]
    page = [[name, *rest] for names, *rest in shown for name in cast(list[str], names)]
    code = [_row(name, decision) for name, decision in (*POLICY.items(), *BY_CODE.items())]
    assert sorted(page) == sorted(code)


def plan_of(
    store: Store,
    ledger: Ledger,
    *,
    memory_gb: float | None = None,
    timeout_s: float = 900,
    facts: ClassFacts = FACTS,
    lift: bool = False,
) -> Plan:
    model = entry("m", store.root.parent)
    model = replace(model, limits=Limits(memory_gb=memory_gb, timeout_s=timeout_s))
    made = campaigns.plan_of(
        [model], store, ledger, facts=facts, device_classes=("portable",), lift_quarantine=lift
    )
    assert [item.device_class for item in made.items] == ["portable"]
    assert len(made.items[0].builds) == 1
    return made


def ended(
    failure: str | None,
    code: str | None = None,
    *,
    peak_bytes: int = 0,
    **tried: Any,
) -> Done:
    """A build that ended on a node."""
    found = Failure(kind=failure, code=code, message="so it was", **tried) if failure else None
    return Done(
        handle=0,
        value=BuildResult(key="b", recipe="portable", failure=found, peak_bytes=peak_bytes),
    )


def test_hang_costs_two_campaigns(store: Store) -> None:
    """By the default limit, and in each campaign one attempt."""
    for _ in range(2):
        with Ledger(store, "c") as ledger:
            plan = plan_of(store, ledger)
            hang = ended("timeout", "CP-TIMEOUT", tried_s=900)
            [(item, outcome)], cluster, _ = executed(store, ledger, [hang], plan)
            assert (outcome.code, len(cluster.started)) == ("CP-TIMEOUT", 1)
            record(ledger, item, outcome)
    with Ledger(store, "c") as ledger:
        assert plan_of(store, ledger).items[0].why == "unchanged"
        assert plan_of(store, ledger, timeout_s=800).items[0].finished is not None
        for again in (plan_of(store, ledger, timeout_s=901), plan_of(store, ledger, lift=True)):
            assert again.items[0].finished is None
            _, cluster, _ = executed(store, ledger, [hang], again)
            assert len(cluster.started) == 1, "the build is not kept either"


def test_crash_is_retried_then_quarantined(store: Store) -> None:
    with Ledger(store, "c") as ledger:
        plan = plan_of(store, ledger)
        [(item, outcome)], cluster, notes = executed(
            store, ledger, [ended("crash", "CP-CRASH")] * 2, plan
        )
        assert len(cluster.started) == 2
        assert "attempt 2 of 2" in notes[0]
        assert (outcome.verdict, outcome.failure_kind) == ("failed", "crash")
        assert "--lift-quarantine" in str(outcome.reason)
        again, second, _ = executed(store, ledger, [], plan)
        assert (len(again), second.started) == (1, []), "the build is kept"
        record(ledger, item, outcome)
        assert plan_of(store, ledger).items[0].finished is not None
        lifted = plan_of(store, ledger, lift=True)
        assert lifted.items[0].finished is None
        _, third, _ = executed(store, ledger, [ended("capture", "CP-CAPTURE")], lifted)
        assert len(third.started) == 1


def test_node_without_memory_is_retried_with_twice_as_much(store: Store) -> None:
    starved = ended("memory", "CP-MEMORY-NODE", peak_bytes=6 * 10**9, tried_bytes=10 * 10**9)
    with Ledger(store, "c") as ledger:
        [(_, outcome)], cluster, notes = executed(
            store, ledger, [starved] * 2, plan_of(store, ledger)
        )
        assert len(cluster.started) == 2
        assert notes[0].endswith("attempt 2 of 2, with 20.0 GB kept free")
        assert (outcome.failure_kind, outcome.failure and outcome.failure.tried_bytes) == (
            "memory",
            10 * 10**9,
        )
        _, same, _ = executed(store, ledger, [], plan_of(store, ledger))
        assert same.started == []
        larger = ClassFacts(num_threads=2, toolchain=FACTS.toolchain, memory_bytes=20 * 10**9)
        _, more, _ = executed(
            store, ledger, [ended("capture")], plan_of(store, ledger, facts=larger)
        )
        assert len(more.started) == 1


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
TRIED = ExceptionGroup(
    "tried",
    [
        BuildError("no graph"),
        RuntimeError("[enforce fail at inline_container.cc:747] . PytorchStreamWriter failed"),
    ],
)
COMPILER = "inductor: g++: fatal error: "


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (CaptureError("no graph"), "capture", "CP-CAPTURE"),
        (SpecError("no dim"), "spec", "CP-SPEC"),
        (InfrastructureError("gone", code="CP-TRACKING"), "infrastructure", "CP-TRACKING"),
        (KeyError("weights"), "error", "CP-ERROR"),
        (chained(BuildError("inductor: failed"), NO_ROOM), "disk", "CP-DISK"),
        (
            BuildError("inductor: error writing to /tmp/x.s: No space left on device"),
            "disk",
            "CP-DISK",
        ),
        (chained(BuildError("all failed"), TRIED), "disk", "CP-DISK"),
        (ValueError("I/O error: Input/output error (os error 5) at path"), "disk", "CP-DISK"),
        (BuildError(f"{COMPILER}Killed signal terminated program cc1plus"), "memory", "CP-MEMORY"),
        (BuildError("inductor: CUDA error: out of memory"), "memory", "CP-MEMORY-GPU"),
        (
            BuildError(f"{COMPILER}vfork: Resource temporarily unavailable"),
            "infrastructure",
            "CP-INFRASTRUCTURE",
        ),
        (
            chained(CaptureError("no graph"), RuntimeError("can't start new thread")),
            "infrastructure",
            "CP-INFRASTRUCTURE",
        ),
    ],
)
def test_exceptions_are_classified(error: Exception, kind: str, code: str) -> None:
    failure = classify(error)
    assert (failure.kind, failure.code) == (kind, code)
    assert str(error) in failure.message


def test_a_cyclic_chain_is_classified() -> None:
    first, second = CaptureError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert classify(first).kind == "capture"
