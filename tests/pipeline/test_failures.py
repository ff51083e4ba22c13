"""Kinds of failures, the retry policy, and that docs/guides/operate.md shows the same table."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import ray.exceptions

from freezer.errors import (
    BuildError,
    CaptureError,
    InfrastructureError,
    SpecError,
)
from freezer.spec import Limits
from freezer.store import Store
from pipeline.cluster import Done
from pipeline.failures import BY_CODE, POLICY, classify, kind_of_ray
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from pipeline.records import ClassFacts
from tests.support import campaigns
from tests.support.campaigns import entry
from tests.support.executions import built, executed, failure_of, record

FACTS = ClassFacts(num_threads=2, toolchain={"torch": "2.13.0"}, memory_bytes=10 * 10**9)


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


def test_operate_page_has_the_same_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "operate.md").read_text()
    rows = re.findall(r"^\| (`.+`) \| (\d) \|.*?\| (.*?) \|$", text, re.MULTILINE)
    policy = {**POLICY, **BY_CODE}
    named = {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    assert named == {name: (str(row.attempts), row.kept) for name, row in policy.items()}


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
        [replace(model, device_classes=("portable",))],
        store,
        ledger,
        facts=facts,
        lift_quarantine=lift,
    )
    assert [item.device_class for item in made.items] == ["portable"]
    assert len(made.items[0].builds) == 1
    return made


def test_hang_costs_two_campaigns(store: Store) -> None:
    """By the default limit, and in each campaign one attempt."""
    for _ in range(2):
        with Ledger(store, "c") as ledger:
            plan = plan_of(store, ledger)
            hang = built("portable", failure_of("timeout", tried_s=900))
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
        ends = [built("portable", failure_of("crash"))] * 2
        [(item, outcome)], cluster, notes = executed(store, ledger, ends, plan)
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
        _, third, _ = executed(store, ledger, ends, lifted)
        assert len(third.started) == 2


TRIED = failure_of("memory", "CP-MEMORY-NODE", tried_bytes=10 * 10**9)


STARVED = built("portable", TRIED, peak_bytes=6 * 10**9)
OF_RAY = Done(handle=0, failure="OutOfMemoryError: of Ray's monitor", kind="node-memory")


@pytest.mark.parametrize(("starved", "reserved_gb"), [(STARVED, 20), (OF_RAY, 2)])
def test_node_without_memory_is_retried_with_twice_as_much(
    store: Store, starved: Done, reserved_gb: int
) -> None:
    with Ledger(store, "c") as ledger:
        plan = plan_of(store, ledger)
        [(_, outcome)], cluster, notes = executed(store, ledger, [starved] * 2, plan)
        assert len(cluster.started) == 2
        assert notes[0].endswith(f"attempt 2 of 2, with {reserved_gb}.0 GB kept free")
        assert outcome.code == "CP-MEMORY-NODE"


def test_memory_is_tried_again_where_there_is_more(store: Store) -> None:
    with Ledger(store, "c") as ledger:
        [(_, outcome)], _, _ = executed(store, ledger, [STARVED] * 2, plan_of(store, ledger))
        assert (outcome.failure and outcome.failure.tried_bytes) == 10 * 10**9
        _, same, _ = executed(store, ledger, [], plan_of(store, ledger))
        assert same.started == []
        larger = replace(FACTS, memory_bytes=20 * 10**9)
        _, more, _ = executed(store, ledger, [STARVED] * 2, plan_of(store, ledger, facts=larger))
        assert len(more.started) == 2


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FOUND = ExceptionGroup(
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
        (chained(BuildError("all failed"), FOUND), "disk", "CP-DISK"),
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
